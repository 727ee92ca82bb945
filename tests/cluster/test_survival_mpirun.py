"""A job under each mpirun loses ranks and hosts, for real; it goes on with the others, and ends with the weights of an
undisturbed run, bit for bit. The same on a real Slurm: test_survival.py.

The job is a pretended PBS job, whose own commands are stand-ins here, which say so. Each test has a cluster of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from livecluster import Cluster
from mpis import RSH, Mpi
from struck_job import (
    ASKED,
    AT,
    FAULTS,
    STEPS,
    STRUCK,
    TWO,
    Outcome,
    assert_nothing_is_left,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: As a real one it runs the words as they are, without a shell, and ends as they do.
TMRSH = r"""
host=$1 line=; shift
for word; do line="$line '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"; done
exec {bin}/remote "$host" "$line"
"""
REMOTE = 'exec {rsh} "$@"'
RELEASE = 'echo "$*" >> {bin}/../released'


@pytest.fixture
def cluster(cluster_of: Callable[..., Iterator[Cluster]], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from cluster_of(f"survival-{abs(hash(request.node.name))}", 4)


class PretendedJob:
    """`hpcddp launch` on login, in a pretended PBS job on the nodes: the script's host is none of the ranks'."""

    def __init__(self, cluster: Cluster, shared: Path, mpi: Mpi) -> None:
        self._cluster, self.folder, self._mpi = cluster, shared, mpi
        self.released = shared / "released"

    def run(self, kinds: str, struck: str, *asked: str, at: str = str(AT), walltime: str = "10m") -> Outcome:
        bin_folder = self.folder / "bin"
        self._write_commands(bin_folder)
        (self.folder / "nodes").write_text("".join(f"node{number}\n" for number in (1, 2, 3, 4)))
        env = self._mpi.env | {
            "PATH": f"{bin_folder}:{self._mpi.env['PATH']}",
            "PBS_NODEFILE": str(self.folder / "nodes"),
            "PBS_JOBID": "7.server",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "OMPI_MCA_plm_rsh_agent": f"{bin_folder}/remote",
            "PRTE_MCA_plm_ssh_agent": f"{bin_folder}/remote",
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": f"{bin_folder}/remote",
            "I_MPI_HYDRA_BOOTSTRAP": "ssh",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{bin_folder}/remote",
        }
        options = [word for setting in asked or ASKED for word in ("--set", setting)]
        size = ["--launcher", self._mpi.launcher, "--ranks-per-node", "1", "--walltime", walltime, "--name", "t"]
        train = [*STRUCK.split(), str(STEPS), kinds, struck, at]
        done = self._cluster.sh(["hpcddp", "launch", *size, *options, "--", *train], cwd=self.folder, env=env)
        return Outcome(done.stdout + done.stderr, self.folder)

    def _write_commands(self, folder: Path) -> None:
        folder.mkdir()
        commands = {
            "remote": REMOTE.format(rsh=RSH),
            "pbs_tmrsh": TMRSH.format(bin=folder),
            "pbs_release_nodes": RELEASE.format(bin=folder),
        }
        for name, command in commands.items():
            (folder / name).write_text(f"#!/bin/sh\n# a stand-in, no scheduler\n{command}\n")
            (folder / name).chmod(0o755)


@pytest.fixture
def job(cluster: Cluster, shared: Path, mpi: Mpi) -> PretendedJob:
    return PretendedJob(cluster, shared, mpi)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_goes_on(cluster: Cluster, job: PretendedJob, fault: str, undisturbed: str) -> None:
    kind, struck, cause, hosts = FAULTS[fault]
    job.run(kind, str(struck)).assert_went_on(cause, hosts, undisturbed)
    assert job.released.exists() == (len(hosts) < 4)
    assert_nothing_is_left(cluster)


def test_a_launcher_whose_daemon_of_a_host_is_killed_does_not_decide(
    cluster: Cluster, job: PretendedJob, undisturbed: str
) -> None:
    outcome = job.run("proxy", "2")
    # MPICH and Intel MPI wait for their ranks, which train on; Open MPI ends at once
    assert outcome.starts in ([], ["node1, node2, node3, node4"]), outcome.said
    assert (outcome.state["status"], outcome.state["step"]) == ("finished", STEPS), outcome.said
    assert outcome.state["weights_sha256"] == undisturbed
    outcome.assert_steps_once()
    assert_nothing_is_left(cluster)


def test_a_spare_takes_the_place_of_a_lost_host_and_after_the_next_loss_fewer_train(
    job: PretendedJob, undisturbed: str
) -> None:
    job.run("cut,cut", "2,2", *ASKED, "spares=1", at=TWO).assert_lost_two(undisturbed)
    assert job.released.read_text() == "-j 7.server node3\n-j 7.server node4\n"


def test_a_start_up_that_never_meets_is_ended_and_the_silent_host_is_left_out(
    cluster: Cluster, job: PretendedJob, undisturbed: str
) -> None:
    cluster.ok(["ip", "link", "set", "eth0", "down"], host="node3", cwd=job.folder)
    outcome = job.run("none", "0")
    assert outcome.causes, outcome.said
    assert re.search(r"no rank was started in 100 s|were not started|did not arrive|launcher ended", outcome.causes[0])
    assert "node3 is left out: it does not answer" in outcome.said
    assert "start 2 of at most 3 on node1, node2, node4\n" in outcome.said
    assert outcome.state["weights_sha256"] == undisturbed


def test_the_host_of_rank_0_may_be_the_lost_one(job: PretendedJob, undisturbed: str) -> None:
    job.run("cut", "0").assert_went_on("node1 is silent", (2, 3, 4), undisturbed)
    assert job.released.read_text() == "-j 7.server node1\n"
