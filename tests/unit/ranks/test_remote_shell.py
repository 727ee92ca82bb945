"""When a launcher is given the scheduler's own starter in the place of ssh; with four mpiruns: tests/cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcddp.ranks.remote_shell import replace_ssh
from hpcddp.runs.folder import RunFolder


class PbsJob:
    """A pretended one on this host and another. `ssh` and `pbs_tmrsh` are stand-ins."""

    def __init__(self, folder: Path, run: str = "runs/t") -> None:
        self.folder, self.told = folder, list[str]()
        self.attempt = RunFolder(str(folder / run)).attempt("7.1")
        os.makedirs(self.attempt.path)
        (folder / "nodes").write_text(f"{os.uname().nodename}\nn2.site\n")
        (folder / "bin").mkdir()
        self.env = {"PATH": str(folder / "bin"), "PBS_NODEFILE": str(folder / "nodes"), "PBS_JOBID": "7.server"}

    def give(self, program: str, status: int) -> None:
        (self.folder / "bin" / program).write_text(f"#!/bin/sh\nexit {status}\n")
        (self.folder / "bin" / program).chmod(0o755)

    def reach(self, launcher: str = "openmpi", scheduler: str = "pbs") -> dict[str, str]:
        return replace_ssh(scheduler, launcher, self.attempt.path, self.env, self.told.append)


@pytest.fixture
def job(tmp_path: Path) -> PbsJob:
    return PbsJob(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [
        ("openmpi", "OMPI_MCA_plm_rsh_agent"),
        ("openmpi", "PRTE_MCA_plm_ssh_agent"),
        ("mpich", "HYDRA_LAUNCHER_EXEC"),
        ("intelmpi", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
    ],
)
def test_a_launcher_is_given_it_where_ssh_does_not_answer(job: PbsJob, launcher: str, variable: str):
    job.give("ssh", 255)
    job.give("pbs_tmrsh", 0)
    between = job.reach(launcher)[variable]
    assert between == f"{job.attempt.path}/remote-shell"
    assert os.access(between, os.X_OK)
    assert job.told == [f"ssh does not reach n2.site: {launcher} is given pbs_tmrsh in its place"]


def test_nothing_is_changed_where_ssh_answers_or_somebody_has_chosen_or_nothing_starts_by_it(job: PbsJob):
    job.give("pbs_tmrsh", 0)
    assert job.reach("srun") == job.reach(scheduler="slurm") == {}
    job.env["OMPI_MCA_plm_rsh_agent"] = "own"
    assert job.reach() == {}
    del job.env["OMPI_MCA_plm_rsh_agent"]
    (job.folder / "nodes").write_text(f"{os.uname().nodename}\n")
    assert job.reach() == {}
    (job.folder / "nodes").write_text("n2.site\n")
    job.give("ssh", 0)
    assert job.reach() == {}
    assert job.told == []


def test_what_cannot_be_done_is_told(job: PbsJob, tmp_path: Path):
    job.env["PBS_EXEC"] = str(tmp_path / "none")
    assert job.reach() == {}
    assert "warning: ssh does not reach n2.site, and pbs_tmrsh is not on PATH" in job.told[0]
    (tmp_path / "other").mkdir()
    blank = PbsJob(tmp_path / "other", "my runs/t")
    blank.give("pbs_tmrsh", 0)
    assert blank.reach() == {}
    assert "has a blank in its name: openmpi starts processes there by ssh" in blank.told[0]


@pytest.mark.parametrize(
    ("nodes", "asked", "host"),
    [
        ("n1.site\nn2.site\n", ["-x", "-l", "me", "n2"], "n2.site"),
        ("n1.site\nn2.site\n", ["n2.site"], "n2.site"),
        ("10.0.0.1\n10.0.0.2\n", ["-x", "10.0.0.1"], "10.0.0.1"),  # no two addresses are one host
    ],
)
def test_the_host_is_called_as_the_job_s_list_has_it(job: PbsJob, nodes: str, asked: list[str], host: str):
    (job.folder / "bin/pbs_tmrsh").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (job.folder / "bin/pbs_tmrsh").chmod(0o755)
    between = job.reach()["OMPI_MCA_plm_rsh_agent"]
    (job.folder / "nodes").write_text(nodes)
    line = [between, *asked, "orted", "--name 'a b'"]
    said = subprocess.run(line, env={**job.env, "PATH": "/bin:/usr/bin"}, capture_output=True, text=True, check=True)
    assert said.stdout == f"{host}|/bin/sh|-c|orted --name 'a b'|"
