"""The cluster as tests use it: run a command on a host, run a batch job to its end, read what the ranks wrote."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bringup.hosts import DOMAIN, address_of, enter

HERE = Path(__file__).parent
PYTHON = sys.executable
PLACE = str(HERE / "programs" / "place.py")
# a process group opened twice; the ranks end one after the other, rank 0 first
MEETING = [PYTHON, str(HERE.parent / "multirank" / "programs" / "rendezvous.py"), "ends-late"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
PATIENCE_S = 600  # a limit for hangs: a busy machine must not reach it

Place = dict[str, Any]  # what programs/place.py writes
Done = subprocess.CompletedProcess[str]


class Job(NamedTuple):
    id: str
    state: str
    output: str


class Cluster(NamedTuple):
    run: Callable[..., Done]
    state: Path

    def sh(
        self,
        argv: Sequence[str],
        *,
        host: str = "login",
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Done:
        """Run on a host, in a clean environment with the tests' Python first on PATH. Does not look at the status."""
        line = [*enter(self.state, host), f"--wd={cwd}", "env", "--unset=TMPDIR", *argv]
        clean = {"TESTCLUSTER_DIR": str(self.state)}
        return self.run(line, env=clean | dict(env or {}), stdin=stdin)

    def ok(self, argv: Sequence[str], **how: Any) -> str:
        """The same, and its standard output; anything but status 0 fails the test."""
        done = self.sh(argv, **how)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def batch(self, script: str, *options: str, cwd: Path) -> Job:
        """sbatch a script's body, wait for the job's end, and return its state and output."""
        job = self.submit(f"#!/bin/bash\n{script}\n", *options, cwd=cwd)
        return self.wait(job, cwd=cwd)

    def submit(self, text: str, *options: str, cwd: Path) -> str:
        # A job inherits what sbatch has, and outlives it: without the mark by which leftover processes are found.
        sbatch = ["env", "--unset=HPCDDP_TEST_MARK", "sbatch", "--parsable", "--output=job-%A.out", *options]
        return self.ok(sbatch, cwd=cwd, stdin=text).strip()

    def wait(self, job: str, *, cwd: Path) -> Job:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            asked = self.sh(["scontrol", "--oneliner", "show", "job", job], cwd=cwd)
            assert asked.returncode in {0, -signal.SIGPIPE}, asked.stderr  # a busy controller hangs up now and then
            said = asked.stdout
            states = re.findall(r"\bJobState=(\S+)", said)
            if states and set(states) <= ENDED:
                break
            assert time.monotonic() < deadline, f"job {job} has not ended:\n{said}\n{_text(cwd, job)}"
            time.sleep(0.2)
        return Job(job, ",".join(sorted(set(states))), _text(cwd, job))

    def places(self, folder: Path) -> list[Place]:
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def wait_until(is_so: Callable[[], object], what: Callable[[], object] = str) -> None:
    """Fails the test with `what()` if it never comes to be so."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def _text(cwd: Path, job: str) -> str:
    return "".join(path.read_text() for path in sorted(cwd.glob(f"job-{job}*.out")))


def by_label(output: str, folder: Path) -> dict[int, Place]:
    """Rank, as `srun --label` says it, -> what the task with that label wrote."""
    lines = re.findall(r"^ *(\d+): wrote (\S+)$", output, re.MULTILINE)
    return {int(label): json.loads((folder / name).read_text()) for label, name in lines}


def assert_is_mpi(places: list[Place], launcher: str, size: int) -> None:
    """Every process found what MPI says of it, and together they are one world of `size` ranks."""
    for place in places:
        assert place["status"] == 0, place["error"]
        found = {key: place["found"][key] for key in place["mpi"]}
        assert found == place["mpi"], place
    assert_one_world(places, launcher, size)


def assert_is_label(places: dict[int, Place], size: int) -> None:
    """Every task found the rank that srun labels it with, and together they are one world of `size` ranks."""
    for label, place in places.items():
        assert place["status"] == 0, place["error"]
        assert place["found"]["rank"] == label, place
    assert_one_world(list(places.values()), "srun", size)


def assert_met(cluster: Cluster, line: list[str], size: int, **how: Any) -> list[dict[str, Any]]:
    """Run MEETING on `size` ranks: all ended in peace, and each saw the sum over all. What each saw, by rank."""
    env = {"OMP_NUM_THREADS": "1", **how.pop("env", {})}
    said = cluster.ok(line, env=env, **how)
    ranks = [json.loads(text) for text in said.splitlines() if text.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == list(range(size)), said
    assert {rank["total"] for rank in ranks} == {size * (size + 1) / 2}
    return sorted(ranks, key=lambda rank: int(rank["rank"]))


def assert_one_world(places: list[Place], launcher: str, size: int) -> None:
    """Ranks 0 … size-1 once each; local ranks 0 … k-1 on each host; what is told of nodes and the master is so."""
    found = [place["found"] for place in places]
    assert sorted(place["rank"] for place in found) == list(range(size))
    assert {(place["launcher"], place["world_size"]) for place in found} == {(launcher, size)}
    hosts = sorted({place["host"] for place in places})
    for host in hosts:
        here = [place["found"] for place in places if place["host"] == host]
        assert sorted(place["local_rank"] for place in here) == list(range(len(here))), host
        assert {place["local_world_size"] for place in here} == {len(here)}, host
        assert len({place["node_rank"] for place in here}) == 1, host
    node_ranks = {place["node_rank"] for place in found}
    assert node_ranks in ({None}, set(range(len(hosts))))
    assert {place["num_nodes"] for place in found} <= {None, len(hosts)}
    masters = {(place["master_addr"], place["master_port"]) for place in found}
    assert len(masters) == 1, masters
    address, _ = masters.pop()
    first = next(place["host"] for place in places if place["found"]["rank"] == 0)
    names = {None, first, f"{first}.{DOMAIN}", address_of(first), *(["127.0.0.1"] if len(hosts) == 1 else [])}
    assert address in names, f"rank 0 is on {first}"
