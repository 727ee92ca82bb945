"""Writes docs/strategies.md: a row for each way to train, from tests/jobs/rows.py. Run it after changing a row."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.jobs.rows import CHECKS, MISSING, ROWS, Row  # noqa: E402  the tests are no package

_HEAD = """\
# Ways to train

<!-- made by docs/make_strategies.py from tests/jobs/rows.py -->

After reading this page you can choose among the ways to train that have a job in `jobs/`, by what the tests found
of each.

```console
$ cd jobs/plain
$ hpcddp render ddp.yaml --site abci3 --account gaa50000 --nodes 2 | grep select
hpcddp: site abci3 (--site)
hpcddp: global batch 64 = 16 ranks x 4 x 1
#PBS -l select=2:mpiprocs=8:ompthreads=12
```

Each job is a YAML file and a script of at most 60 lines. [jobs/README.md](../jobs/README.md) says how to run them.

| way to train | job | renders for | runs here on | equals one process | resumes elsewhere | stops in time |
|---|---|---|---|---|---|---|
"""
_COLUMNS = """
Each row is a test, which fails where the table says what is not so (`tests/jobs/`, `tests/frameworks/`):

| column | what the test does |
|---|---|
| renders for | `hpcddp render` makes a script for ABCI 3.0 and one for Slurm; `hpcddp lint` finds nothing in either |
| runs here on | `hpcddp render --site local \\| bash` on two CPUs without a GPU, by Open MPI and gloo |
| equals one process | the largest difference of any weight from a training on one rank with the same global batch |
| resumes elsewhere | stopped on the most ranks and resumed on one, it ends with the same weights |
| stops in time | it saves at the end of the walltime, and the job's status is 85: unfinished |
"""
_MISSING = """
## Ways that have no job

| way to train | why |
|---|---|
"""


def page() -> str:
    reasons: list[str] = []
    table = "".join(_line(row, reasons) for row in ROWS)
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    missing = "".join(f"| {way} | {why} |\n" for way, why in MISSING)
    return f"{_HEAD}{table}\n{notes}{_COLUMNS}{_MISSING}{missing}"


def _line(row: Row, reasons: list[str]) -> str:
    def note(text: str) -> str:
        """A number that leads to the text below the table."""
        if text not in reasons:
            reasons.append(text)
        return f"({reasons.index(text) + 1})"

    def answer(text: str) -> str:
        return "yes" if text == "yes" else f"{'-' if text == CHECKS else 'no'} {note(text)}"

    if row.trains:
        equal = "bit for bit" if row.equal_to == "bits" else f"within {row.equal_to}"
        equal += f" {note(row.why)}" if row.why else ""
    else:
        equal = f"- {note(row.equal_to)}"
    jobs = ", ".join(f"`jobs/{job}`" for job in (row.job, *row.also))
    ranks = ", ".join(map(str, row.ranks)) + (" rank" if row.ranks == (1,) else " ranks")
    return f"| {' | '.join([row.name, jobs, row.renders, ranks, equal, answer(row.resumes), answer(row.stops)])} |\n"


if __name__ == "__main__":
    (DOCS / "strategies.md").write_text(page(), encoding="utf-8")
