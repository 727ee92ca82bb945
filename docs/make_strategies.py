"""Writes docs/strategies.md: a row for each way to train, from tests/jobs/rows.py. Run it after changing a row."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.jobs.choosing import sends, when  # noqa: E402  the tests are no package
from tests.jobs.rows import CHECKS, MISSING, ROWS, Row  # noqa: E402
from tests.jobs.splits import KINDS, LAYERS, WORDS, held  # noqa: E402

_HEAD = """\
# Ways to train

<!-- made by docs/make_strategies.py from tests/jobs/rows.py -->

This page lists the ways to train that have a job in `jobs/`: what each rank holds and sends, and what the tests found
of each.

```console
$ cd jobs/plain
$ hpcddp render ddp.yaml --site abci3 --account gaa50000 --nodes 2 | grep select
hpcddp: site abci3 (--site)
hpcddp: the job's output will be ~/ddp-batch+per_rank_batch-4e17b875f2.oID, with the job's number (-k oe)
hpcddp: global batch 64 = 16 ranks x 4 x 1
#PBS -l select=2:mpiprocs=8:ompthreads=12
```

[jobs/README.md](../jobs/README.md) says how to run them, [advise.md](advise.md) which split fits into the memory of a
site's GPUs.

## What a rank holds, and what it sends

A model of four layers. Each square is the matrix of a layer, and its filled part is what the rank holds between two
steps. `samples 1/4` are the rank's samples of the global batch.

"""
_FORMULAS = """
| split | a rank of the picture holds of the weights | calls in a step | a rank sends in a step, in bytes | of P |
|---|---|---|---|---|
"""
_LETTERS = """
The last column is for 32 ranks on 4 nodes. The formulas are for rings. Tests count what four training ranks hold and
send, but for `two-devices`. FSDP without `rt.wrap(model, blocks=…)` keeps the whole model from the forward to the
backward pass, and sends `2 P (S - 1) / S`.

| letter | meaning |
|---|---|
"""
_TABLE = """
## Which to choose, and what the tests found

| way to train | job | choose it when | sends as | ranks here | equals one process | resumes elsewhere, stops in time |
|---|---|---|---|---|---|---|
"""
EXAMPLE = {"P": 1.0, "W": 32, "S": 8, "C": 4, "T": 8}
_COLUMNS = """
Each row is a test (`tests/jobs/`, `tests/frameworks/`), on CPUs by Open MPI and gloo. Weights are compared with those
of one rank with the same global batch. DeepSpeed's bytes are those of its paper (arXiv 1910.02054), not counted here.
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
    found = f"{_TABLE}{table}\n{notes}{_COLUMNS}{_MISSING}{missing}"
    return f"{_HEAD}{_pictures()}{_formulas()}{found}"


def _pictures() -> str:
    return "\n".join(f"![{kind.says}](splits/{kind.name}.svg)\n" for kind in KINDS)


def _formulas() -> str:
    """The table of exchanges, and what its letters mean."""
    rows = ""
    for kind in KINDS:
        calls = ", ".join(f"{one.call}{f' x {one.times}' if one.times > 1 else ''}" for one in kind.exchanges)
        parts = [part for part in held(kind, 0)["weights"] if part]
        share = sum((part.bottom - part.top) * (part.right - part.left) for part in parts) / LAYERS
        values = EXAMPLE | ({"S": EXAMPLE["W"]} if kind.name == "fsdp" else {})
        only = [one for one in kind.exchanges if one.amount.startswith("P")]
        sent = sum(one.bytes_sent(values) for one in only) / EXAMPLE["P"]
        number = f"{sent:.2f}" if len(only) == len(kind.exchanges) else "-"
        rows += f"| {kind.name} | {share:.0%} | {calls} | `{kind.formula}` | {number} |\n"
    letters = "".join(f"| {letter} | {meaning} |\n" for letter, meaning in WORDS.items())
    return f"{_FORMULAS}{rows}{_LETTERS}{letters}"


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
    only = "" if row.renders == Row._field_defaults["renders"] else f" ({row.renders})"
    later = " / ".join(dict.fromkeys((answer(row.resumes), answer(row.stops))))
    cells = [row.name, jobs + only, when(row.name), sends(row.name), ", ".join(map(str, row.ranks)), equal, later]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    (DOCS / "strategies.md").write_text(page(), encoding="utf-8")
