"""What srun's ranks get of a signal: alone, and in a rendered script. docs/signals.md has the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until

from tests.signal_table import ALONE, SAVES, outcome, read_table

pytestmark = [pytest.mark.cluster, pytest.mark.first]

SENT = {
    "`scancel JOB`": "TERM",
    "`scancel --signal=USR1 JOB`": "USR1",
    "`scancel --batch --signal=TERM JOB`": "TERM",
    "`scancel --batch --signal=USR1 JOB`": "USR1",
    f"`scancel --signal=USR1 JOB`{ALONE}": "USR1",
}
_SHORT = ("`scancel JOB`", "`scancel --batch --signal=TERM JOB`", f"`scancel --signal=USR1 JOB`{ALONE}")
_BARE = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\nsrun {PYTHON} {SAVES} SIGNAL\n"


def _cases() -> list[Any]:
    cases = [("script", "`scancel --full --signal=USR1 JOB`", "USR1", "USR1, saves")]
    for name, sent, bare, script in read_table(SENT):
        assert name == "srun"
        cases += [("bare", sent, SENT[sent], bare), ("script", sent, SENT[sent], script)]
    slow = pytest.mark.slow
    return [pytest.param(*one, marks=() if one[0] == "script" and one[1] in _SHORT else slow) for one in cases]


@pytest.mark.parametrize(("kind", "sent", "signal", "expected"), _cases())
def test_a_program_gets_what_the_table_of_the_manual_says(
    cluster: Cluster, shared: Path, kind: str, sent: str, signal: str, expected: str
) -> None:
    catches = f"0:{signal}" if ALONE in sent else signal
    text = _BARE.replace("SIGNAL", catches)
    if kind == "script":
        size = ["--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1", "--walltime", "0:30:00"]
        request = ["hpcddp", "render", "--site", f"{HERE}/site.yaml", *size, "--", PYTHON, SAVES, catches]
        text = cluster.ok(request, cwd=shared)
    job = cluster.submit(text, cwd=shared)
    wait_until(lambda: len(list(shared.glob("here-*"))) == 2)
    cluster.ok(sent.split("`")[1].replace("JOB", job).split(), cwd=shared)
    output = cluster.wait(job, cwd=shared).output
    assert outcome(shared, 1 if ALONE in sent else 2) == expected, output
    if kind == "script":  # it has not finished, nor failed
        status = "138" if ALONE in sent else "0"
        assert next(shared.glob("runs/*/holders/*/ended")).read_text().split() == [status, f"SIG{signal}"]


def test_the_table_has_each_way_in_which_slurm_signals_a_job() -> None:
    assert {row[1] for row in read_table(SENT)} == set(SENT)
