"""What the tests of survival share: a training that faults strike, what is expected of its job, and a quiet run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from livecluster import HERE, PYTHON, Cluster

STRUCK = f"{PYTHON} {HERE.parent}/multirank/programs/struck.py"
STEPS, AT = 18, 10
TWO = f"{AT},{AT + 3}"  # the steps of two faults
ASKED = ["max_restarts=2", "stall_limit=10s"]

# kind of fault, rank, what the first cause says, and the hosts of the second start
FAULTS: dict[str, tuple[str, int, str, tuple[int, ...]]] = {
    "a rank is killed": ("kill", 2, r"rank 2 on node3 was killed by SIGKILL", (1, 2, 3, 4)),
    "a rank is frozen": ("freeze", 2, r"no rank gets on.*rank 2 on node3 was stopped by a signal", (1, 2, 3, 4)),
    "a rank hangs": ("hang", 2, r"no rank gets on.*rank 2 on node3 stands at faults.py:\d+, in strike", (1, 2, 3, 4)),
    "a rank ends with status 1": ("exit", 2, r"rank 2 on node3 ended with status 1", (1, 2, 3, 4)),
    "a rank ends with status 0": ("leave", 2, r"rank 2 on node3 ended with status 0 while others", (1, 2, 3, 4)),
    "an error, once": ("error", 2, r"rank 2 on node3: ValueError: a value that no step can have", (1, 2, 3, 4)),
    "the process beside a rank is killed": ("companion", 2, r"rank 2 on node3 vanished", (1, 2, 3, 4)),
    "a host's network is cut": ("cut", 2, r"node3 is silent", (1, 2, 4)),
    "a rank is killed during a save": ("save", 0, "rank 0 on node1 was killed by SIGKILL", (1, 2, 3, 4)),
    "the disk is full during a save": ("full", 0, "rank 0 on node1.*No space left", (1, 2, 3, 4)),
    "all processes of a host are killed": ("host", 2, r"rank 2 on node3 vanished", (1, 2, 3, 4)),
}


def undisturbed_run(run: Callable[..., Any], folder: Path, steps: int) -> str:
    """The weights of a run on one rank, that nothing has struck."""
    train = [*STRUCK.split(), str(steps), "none", "0", "0", "0"]
    done = run(["hpcddp", "launch", "--here", "--ranks-per-node", "1", "--name", "t", "--", *train], cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(json.loads((folder / "runs/t/state.json").read_text())["weights_sha256"])


class Outcome:
    """What a job has said, and left in its folder."""

    def __init__(self, said: str, folder: Path) -> None:
        self.said, self.folder = said, folder
        self.state: dict[str, Any] = json.loads((folder / "runs/t/state.json").read_text())

    @property
    def starts(self) -> list[str]:
        """The hosts of each start but the first."""
        return re.findall(r"hpcddp: start \d of at most \d on (.+?), from step \d+", self.said)

    @property
    def causes(self) -> list[str]:
        return re.findall(r"hpcddp: the first cause: (.+)", self.said)

    def assert_went_on(self, cause: str, hosts: tuple[int, ...], undisturbed: str) -> None:
        assert len(self.causes) == 1, self.said
        assert re.search(cause, self.causes[0]), self.said
        assert self.starts == [", ".join(f"node{number}" for number in hosts)], self.said
        assert f"from step {AT - 1}\n" in self.said
        assert (self.state["status"], self.state["step"]) == ("finished", STEPS), self.said
        assert self.state["weights_sha256"] == undisturbed
        self.assert_steps_once()
        after_s = (self.folder / "again").stat().st_mtime - (self.folder / f"struck-{AT}").stat().st_mtime
        print(f"from the fault to the next step: {after_s:.1f} s")  # for docs/survival.md; a busy machine takes longer

    def assert_lost_two(self, undisturbed: str) -> None:
        """Of three hosts and a spare one: rank 2's, which is node3, then rank 2's again, which is the spare node4."""
        first = min((self.folder / "runs/t/attempts").iterdir())
        assert len(list(first.glob("env/rank-*"))) == 3
        assert self.starts == ["node1, node2, node4", "node1, node2"], self.said
        assert [cause.split()[0] for cause in self.causes] == ["node3", "node4"]
        assert (self.state["status"], self.state["step"]) == ("finished", STEPS), self.said
        assert self.state["weights_sha256"] == undisturbed
        self.assert_steps_once()

    def assert_steps_once(self, steps: int = STEPS) -> None:
        """Each step was made; what was made twice was lost with the start before, behind its last checkpoint."""
        made: list[list[int]] = []
        attempts = self.folder / "runs/t/attempts"
        for attempt in sorted(attempts.iterdir(), key=lambda path: int(path.name.rpartition(".")[2])):
            lines = (attempt / "metrics.jsonl").read_text().splitlines()
            made.append([line["step"] for line in map(json.loads, lines) if "loss" in line])
        at = 0
        for of_attempt in filter(None, made):  # it may be lost before its first step
            assert of_attempt == list(range(of_attempt[0], of_attempt[0] + len(of_attempt)))
            assert of_attempt[0] <= at + 1
            at = of_attempt[-1]
        assert at == steps


def assert_nothing_is_left(cluster: Cluster) -> None:
    """No process of the job on any host that can be reached, and none that goes on writing."""
    for host in ("login", "node1", "node2", "node3", "node4"):
        left = cluster.sh(["pgrep", "-a", "-f", "struck[.]py"], host=host, cwd=Path("/"))
        assert left.stdout == "", host


def remove_memory_group(shared: Path) -> None:
    """The control group of a rank that took too much memory, which its end leaves behind empty."""
    for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        group = Path(root, f"hpcddp-{shared.name}")
        if group.exists():
            group.rmdir()
