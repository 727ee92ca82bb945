"""How long ten thousand jobs take to read, beside what Python's own json or split need for the same text.

    python benchmarks/jobs_listed.py

Prints one line for each scheduler: seconds of hpcddp's parser, and the ratio to the plain reading of the text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import CommandAnswer

JOBS = 10_000
CAPTURES = Path(__file__).parents[1] / "tests/captures"


def slurm() -> str:
    """Recorded lines, again and again with other ids."""
    lines = json.loads((CAPTURES / "slurm/squeue.json").read_text())["stdout"].splitlines()
    return "".join(f"{n}|{n}|{lines[n % len(lines)].split('|', 2)[2]}\n" for n in range(1, JOBS + 1))


def pbs() -> str:
    """A recorded job, with all its variables."""
    cases = json.loads((CAPTURES / "pbs/arrays.json").read_text())["cases"]
    said = next(case["stdout"] for case in cases if case.get("command") == "qstat -t -f -F json '353[].pbs1'")
    job = json.loads(said)["Jobs"]["353[2].pbs1"]
    return json.dumps({"Jobs": {f"{n}.pbs1": job for n in range(JOBS)}}, indent="\t")


def gridengine() -> str:
    """The form of `qstat -u USER -xml`."""
    one = "<job_list state='pending'><JB_job_number>{}</JB_job_number><JB_name>a</JB_name><state>qw</state></job_list>"
    return f"<job_info><queue_info/><job_info>{''.join(map(one.format, range(JOBS)))}</job_info></job_info>"


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


PLAIN: dict[str, tuple[Callable[[], str], Callable[[str], object]]] = {
    "slurm": (slurm, lambda text: [line.split("|") for line in text.splitlines()]),
    "pbs": (pbs, json.loads),
    "gridengine": (gridengine, ElementTree.fromstring),
}

for name, (make, read) in PLAIN.items():
    text = make()
    row = find_scheduler(name)
    found = row.commands.parse_jobs(CommandAnswer(0, text, ""), row.states)
    assert len(found.jobs) == JOBS, name
    assert found.problem == "", found.problem
    ours, plain = (
        seconds(lambda r=row, t=text: r.commands.parse_jobs(CommandAnswer(0, t, ""), r.states)),
        seconds(lambda f=read, t=text: f(t)),
    )
    print(
        f"{name:10}  {JOBS} jobs, {len(text) / 2**20:.1f} MiB: {ours:.3f} s, {ours / plain:.1f} times the plain reading"
    )
