"""The same faults under hpcddp and under torchrun's --max-restarts, on four hosts of tests/cluster: a Markdown table.

Needs root on Debian 12 (tests/cluster/README.md). `python benchmarks/survival/compare.py [FAULT …]`; PATIENCE_S is how
long a job may take to go on. torchrun is started once per node by srun, with the rendezvous that its pages recommend.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
STATE = Path(os.environ.get("TESTCLUSTER_DIR") or "/var/tmp/hpcddp-survival")
STEPS, AT, STEP_S = 18, 10, 0.1
PATIENCE_S = 180
FAULTS = {
    "none": "none",
    "kill": "SIGKILL of a rank",
    "error": "an error, once",
    "leave": "a rank ends with status 0",
    "freeze": "SIGSTOP of a rank",
    "hang": "a rank sleeps for ever",
    "companion": "the process that started the rank is killed",
    "cut": "a host's network is cut",
}


class Outcome(NamedTuple):
    ended: str  # the step that was reached, or why none was
    again_s: float | None  # from the fault to the next step
    made_twice: int
    sha256: str


def on_cluster(*words: str, cwd: Path) -> str:
    line = [str(REPO / "tests/cluster/cluster"), "exec", "login", *words]
    env = os.environ | {"TESTCLUSTER_DIR": str(STATE), "PATH": f"{REPO}/.venv/bin:{os.environ['PATH']}"}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout


def with_hpcddp(fault: str, folder: Path) -> str:
    """The job script."""
    site = REPO / "tests/cluster/site.yaml"
    size = ["--site", str(site), "--nodes", "4", "--ranks-per-node", "1", "--cpus-per-rank", "1", "--name", "t"]
    asked = ["--set", "max_restarts=3", "--set", "stall_limit=10s", "--set", "min_nodes=2"]
    program = [sys.executable, str(REPO / "tests/multirank/programs/struck.py")]
    return on_cluster("hpcddp", "render", *size, *asked, "--", *program, *arguments(fault, "2"), cwd=folder)


def with_torchrun(fault: str, _folder: Path) -> str:
    """The same."""
    own = "--nnodes=2:4 --nproc-per-node=1 --max-restarts=3"
    own += " --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=node1:29400"
    program = f"{REPO}/benchmarks/survival/elastic.py {' '.join(arguments(fault, 'node3'))}"
    return f"""#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --time=10 --no-kill
export OMP_NUM_THREADS=1
exec srun --kill-on-bad-exit=0 {sys.executable} -m torch.distributed.run {own} {program}
"""


def arguments(fault: str, struck: str) -> list[str]:
    return [str(STEPS), fault, struck, str(AT), str(STEP_S)]


@contextmanager
def cluster_of_four(name: str) -> Iterator[Path]:
    """A new folder that all of its hosts see."""
    cluster = [str(REPO / "tests/cluster/cluster")]
    env = os.environ | {"TESTCLUSTER_DIR": str(STATE)}
    subprocess.run([*cluster, "up", "-n", "4"], env=env, check=True)
    try:
        folder = STATE / "work" / name
        folder.mkdir()
        yield folder
    finally:
        subprocess.run([*cluster, "down"], env=env, check=True)
        shutil.rmtree(STATE / "work", ignore_errors=True)


def run(tool: str, fault: str) -> Outcome:
    with cluster_of_four(f"{tool}-{fault}") as folder:
        (folder / "job.sh").write_text(TOOLS[tool](fault, folder))
        job = on_cluster("sbatch", "--parsable", "--output=out", "job.sh", cwd=folder).strip()
        until = None
        while True:
            asked = ["squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job}"]
            state = on_cluster(*asked, cwd=folder).strip()
            if state not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", ""} or is_over(folder):
                break
            if until is None and (fault == "none" or (folder / f"struck-{AT}").exists()):
                until = time.monotonic() + PATIENCE_S
            if until is not None and time.monotonic() > until:
                break
            time.sleep(0.5)
        return read(tool, folder)


def is_over(folder: Path) -> bool:
    """Whether the training is, as the job may wait for a host that is cut off."""
    return (folder / "weights").exists() or "hpcddp: run t: finished" in text_of(folder / "out")


def read(tool: str, folder: Path) -> Outcome:
    if tool == "hpcddp":
        made = []
        for metrics in (folder / "runs/t/attempts").glob("*/metrics.jsonl"):
            made += [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
        state = json.loads((folder / "runs/t/state.json").read_text())
        ended = f"step {state['step']}" if state["status"] == "finished" else state["status"]
        sha256 = state.get("weights_sha256") or ""
    else:
        made = [int(line) for line in text_of(folder / "made").split()]
        sha256, _, step = text_of(folder / "weights").strip().partition(" ")
        error = re.findall(r"^\w*Error.*", text_of(folder / "out"), re.MULTILINE)
        ended = f"step {step}" if step else f"no: {error[-1][:60]}" if error else f"not within {PATIENCE_S} s"
    again = folder / "again"
    again_s = again.stat().st_mtime - (folder / f"struck-{AT}").stat().st_mtime if again.exists() else None
    return Outcome(ended, again_s, len(made) - len(set(made)), sha256)


def text_of(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


TOOLS = {"hpcddp": with_hpcddp, "torchrun": with_torchrun}


def main() -> None:
    faults = ["none", *(sys.argv[1:] or [fault for fault in FAULTS if fault != "none"])]
    quiet: dict[str, str] = {}
    print("| fault | tool | ended | from the fault to the next step | steps made twice | the bits of a quiet run |")
    print("|---|---|---|---|---|---|")
    for fault in faults:
        for tool in TOOLS:
            outcome = run(tool, fault)
            if fault == "none":
                quiet[tool] = outcome.sha256
            again = "" if outcome.again_s is None else f"{outcome.again_s:.0f} s"
            same = "yes" if outcome.sha256 and outcome.sha256 == quiet[tool] else "no"
            cells = [FAULTS[fault], tool, outcome.ended, again, str(outcome.made_twice), same]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
