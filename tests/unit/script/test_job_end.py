"""The supervisor leaves in the attempt's folder which job it is and when that ends."""

from __future__ import annotations

import json

from hpcddp.runs.folder import RunFolder
from hpcddp.runs.submitted import JobEnd, read_job_end
from hpcddp.schedulers.registry import find_scheduler

from .conftest import StubbedNode, script


def test_a_job_leaves_its_scheduler_its_id_and_its_end_in_the_attempts_folder(node: StubbedNode):
    done = node.run(script("generic-slurm", node.planned_by, name="x"), SLURM_JOB_END_TIME="2000000000")
    assert done.returncode == 0
    written = json.loads((node.folder / "runs/x/attempts/77.1/job.json").read_text())
    end = find_scheduler("slurm").variables.end
    expected = {
        "scheduler": "slurm",
        "job": "77",
        "nodes": 1,
        "ends": 2000000000,
        "source": f"as {end} says",
        "warns": None,
    }
    assert written == {"schema": 1, **expected}
    assert read_job_end(RunFolder(str(node.folder / "runs/x")).attempt("77.1")) == JobEnd(**expected)
