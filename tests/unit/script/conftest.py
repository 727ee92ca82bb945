from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcddp.script.plan import JobPlan, PlannedBy, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site_file import SiteChoice, open_site
from hpcddp.script.spec import read_spec

PLANNED_BY = PlannedBy(python="/opt/env/bin/python", version="1.2.3", created_by="hpcddp render", cpus=6)
# What each shipped site wants to know before it takes a job of any size.
ENOUGH = {
    "local": {},
    "abci3": {"account": "gabc12345"},
    "generic-pbs": {"gpus_per_node": "2", "cpus_per_rank": "8", "walltime": "1:00:00"},
    "generic-slurm": {"gpus_per_node": "2", "cpus_per_rank": "8", "walltime": "1:00:00"},
    "generic-gridengine": {"gpus_per_node": "2", "cpus_per_rank": "8", "walltime": "1:00:00", "pe": "mpi"},
}


def enough_for(site: str) -> dict[str, str]:
    """What a shipped site wants to know. A scheduler's generic site that is not in ENOUGH: what most of them want."""
    return ENOUGH.get(site, ENOUGH["generic-slurm"] if site.startswith("generic-") else {})


def plan(site: str, planned_by: PlannedBy = PLANNED_BY, /, **asked: object) -> JobPlan:
    """The plan of a request on a shipped site; what is not asked for is the least that the site takes."""
    values = {"command": ["python", "train.py"], **enough_for(site), **asked}
    profile = open_site(SiteChoice(site, "--site"), {})
    spec = read_spec({key: (value, f"--{key}") for key, value in values.items() if value is not None}, profile.vars)
    return plan_job(spec, profile, planned_by)


def script(site: str, planned_by: PlannedBy = PLANNED_BY, /, **asked: object) -> str:
    return render_script(plan(site, planned_by, **asked))


# Launchers that run one rank here, and a Python that writes down what it was given.
_LAUNCHER = '#!/bin/bash\nwhile [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done\nexec "$@"\n'
_PYTHON = """#!/bin/bash
if [ "$3" = supervise ]; then exec THIS "$@"; fi
while [ "$1" != -- ]; do shift; done
shift
env -0 > FOLDER/environment
printf '%s\\0' "$@" > FOLDER/arguments
exit "${STUB_STATUS:-0}"
"""


class StubbedNode:
    """A folder in which scripts run under bash, with stub launchers and a stub Python that records its rank's world."""

    def __init__(self, folder) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("mpirun", "mpiexec", "mpiexec.hydra", "srun"):
            self._write(folder / "bin" / name, _LAUNCHER)
        (folder / "nodefile").write_text("node001.hpc.test\n" * 4)
        (folder / "pe_hostfile").write_text(
            "node001.hpc.test 8 all.q@node001 UNDEFINED\nnode002.hpc.test 8 all.q@x 0,1\n"
        )
        (folder / "env").mkdir()
        self._write(folder / "env/python", _PYTHON.replace("FOLDER", str(folder)).replace("THIS", sys.executable))
        self.planned_by = PLANNED_BY._replace(python=f"{folder}/env/python")

    def _write(self, path, text) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, text: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        node = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "PBS_JOBID": "12[3].pbs1",
            "PBS_NODEFILE": f"{self.folder}/nodefile",
            "SLURM_JOB_ID": "77",
            "JOB_ID": "77",
            "PE_HOSTFILE": f"{self.folder}/pe_hostfile",
            **env,
        }
        script = self.folder / "job-script"
        script.write_text(text)
        return subprocess.run(
            ["bash", script], stdin=subprocess.DEVNULL, env=node, cwd=self.folder, capture_output=True, timeout=600
        )

    @property
    def arguments(self) -> list[str]:
        return [os.fsdecode(a) for a in (self.folder / "arguments").read_bytes().split(b"\0")[:-1]]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (os.fsdecode(p).partition("=") for p in (self.folder / "environment").read_bytes().split(b"\0")[:-1])
        return {name: value for name, _, value in pairs}


@pytest.fixture
def node(tmp_path) -> StubbedNode:
    return StubbedNode(tmp_path)
