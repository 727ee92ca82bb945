"""A job loses ranks and hosts, for real, on a Slurm and under each mpirun over four hosts; it goes on with the others,
and ends with the weights of an undisturbed run, bit for bit.

Each test has a cluster of its own: it breaks hosts. PBS's own commands are stand-ins here, which say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until
from mpis import RSH, Mpi

pytestmark = [pytest.mark.cluster, pytest.mark.first]

STRUCK = f"{PYTHON} {HERE.parent}/multirank/programs/struck.py"
STEPS, AT = 18, 10
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
}
#: Of a host of which every process is gone: mpirun's starter starts new ones there, Slurm's needs its daemon.
KILLED_HOST = ("host", 2, r"rank 2 on node3 vanished")


@pytest.fixture
def cluster(cluster_of: Callable[..., Iterator[Cluster]], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from cluster_of(f"survival-{abs(hash(request.node.name))}", 4)


@pytest.fixture(scope="session")
def undisturbed(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_run(run, tmp_path_factory.mktemp("undisturbed"), STEPS)


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
        assert (self.state["status"], self.state["step"]) == ("finished", STEPS), self.said
        assert self.state["weights_sha256"] == undisturbed
        self.assert_steps_once()
        after_s = (self.folder / "again").stat().st_mtime - (self.folder / f"struck-{AT}").stat().st_mtime
        print(f"from the fault to the next step: {after_s:.1f} s")  # for docs/survival.md; a busy machine takes longer

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


def on_slurm(cluster: Cluster, shared: Path, kind: str, struck: int, *asked: str) -> Outcome:
    """One fault, at step AT."""
    job = cluster.wait(submit(cluster, shared, kind, str(struck), str(AT), *asked), cwd=shared)
    return Outcome(job.output, shared)


def submit(
    cluster: Cluster,
    shared: Path,
    kinds: str,
    struck: str,
    at: str,
    *asked: str,
    length: int = STEPS,
    walltime: str = "0:10:00",
) -> str:
    """The job's id."""
    request = ["--site", f"{HERE}/site.yaml", "--nodes", "4", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    options = [word for setting in asked or ASKED for word in ("--set", setting)]
    train = [*STRUCK.split(), str(length), kinds, struck, at]
    options += ["--walltime", walltime, "--name", "t"]
    text = cluster.ok(["hpcddp", "render", *request, *options, "--", *train], cwd=shared)
    return cluster.submit(text, cwd=shared)


@pytest.mark.parametrize(
    "fault", [name if name.endswith("is cut") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_job_on_slurm_goes_on(cluster: Cluster, shared: Path, fault: str, undisturbed: str) -> None:
    kind, struck, cause, hosts = FAULTS[fault]
    on_slurm(cluster, shared, kind, struck).assert_went_on(cause, hosts, undisturbed)
    assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_a_job_on_slurm_goes_on_without_a_host_of_which_all_processes_are_gone(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    kind, struck, cause = KILLED_HOST
    on_slurm(cluster, shared, kind, struck).assert_went_on(cause, (1, 2, 4), undisturbed)


@pytest.mark.slow
def test_a_rank_that_takes_too_much_memory_is_ended_by_the_kernel_and_started_again(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    on_slurm(cluster, shared, "memory", 2).assert_went_on(
        "rank 2 on node3 was killed by SIGKILL", (1, 2, 3, 4), undisturbed
    )
    for left in [*Path("/sys/fs/cgroup/memory").glob("hpcddp-*"), *Path("/sys/fs/cgroup").glob("hpcddp-*")]:
        left.rmdir()


@pytest.mark.slow
def test_a_host_without_its_daemon_trains_on_and_is_left_out_of_the_next_start(
    cluster: Cluster, shared: Path, undisturbed: str
) -> None:
    outcome = Outcome(
        cluster.wait(submit(cluster, shared, "daemon,kill", "2,1", f"{AT - 3},{AT}"), cwd=shared).output, shared
    )
    outcome.assert_went_on("rank 1 on node2 was killed by SIGKILL", (1, 2, 4), undisturbed)
    assert "node3 is left out: it does not answer" in outcome.said


@pytest.mark.slow
def test_nothing_is_started_again_shortly_before_the_job_s_end(cluster: Cluster, shared: Path) -> None:
    job = cluster.wait(submit(cluster, shared, "kill", "2", str(AT), walltime="0:01:00"), cwd=shared)
    outcome = Outcome(job.output, shared)
    assert "the ranks are not started again: the job ends soon" in outcome.said
    assert (job.state, outcome.starts) == ("FAILED", [])
    assert (outcome.state["status"], outcome.state["step"]) == ("unfinished", 9)


@pytest.mark.slow
def test_a_network_that_comes_back_at_once_is_no_fault(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    outcome = on_slurm(cluster, shared, "glitch", 2)
    assert outcome.causes == [], outcome.said
    assert outcome.state["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_a_lost_one(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    request = ["--site", f"{HERE}/site.yaml", "--nodes", "3", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    options = [word for setting in (*ASKED, "spares=1", "min_nodes=3") for word in ("--set", setting)]
    train = [*STRUCK.split(), str(STEPS), "cut", "2", str(AT)]
    text = cluster.ok(["hpcddp", "render", *request, *options, "--name", "t", "--", *train], cwd=shared)
    assert "#SBATCH --nodes=4\n" in text
    job = cluster.wait(cluster.submit(text, cwd=shared), cwd=shared)
    Outcome(job.output, shared).assert_went_on("node3 is silent", (1, 2, 4), undisturbed)


@pytest.mark.slow
def test_an_error_at_the_same_step_for_ever_ends_the_job_as_failed(cluster: Cluster, shared: Path) -> None:
    outcome = on_slurm(cluster, shared, "bug", 2)
    assert len(outcome.starts) == 1
    assert f"the same error came twice at step {AT}: it would come again" in outcome.said
    assert (outcome.state["status"], outcome.state["step"]) == ("failed", AT)


@pytest.mark.slow
def test_two_hosts_are_lost_one_after_the_other(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    # with node3 gone, rank 2 is on node4
    job = submit(cluster, shared, "cut,cut", "2,2", f"{AT},{AT + 3}")
    wait_until(lambda: "hpcddp: run t: finished" in output_of(shared, job))
    for host in ("node3", "node4"):  # this Slurm takes one host out of a job and no second one; it waits for both
        cluster.ok(["ip", "link", "set", "eth0", "up"], host=host, cwd=shared)
    outcome = Outcome(cluster.wait(job, cwd=shared).output, shared)
    assert outcome.starts == ["node1, node2, node4", "node1, node2"], outcome.said
    assert [cause.split()[0] for cause in outcome.causes] == ["node3", "node4"]
    assert (outcome.state["status"], outcome.state["step"]) == ("finished", STEPS), outcome.said
    assert outcome.state["weights_sha256"] == undisturbed
    outcome.assert_steps_once()


@pytest.mark.slow
def test_a_host_that_comes_back_finds_that_the_job_went_on(cluster: Cluster, shared: Path, undisturbed: str) -> None:
    on_slurm(cluster, shared, "return", 2).assert_went_on("node3 is silent", (1, 2, 4), undisturbed)
    wait_until(lambda: "UP" in cluster.ok(["ip", "-br", "link", "show", "eth0"], host="node3", cwd=Path("/")))
    assert_nothing_is_left(cluster)
    state = json.loads((shared / "runs/t/state.json").read_text())
    assert (state["status"], state["weights_sha256"]) == ("finished", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"), [("save", "rank 0 on node1 was killed by SIGKILL"), ("full", "rank 0 on node1: .*No space left")]
)
def test_a_loss_during_a_save_leaves_the_checkpoint_before_it(
    cluster: Cluster, shared: Path, undisturbed: str, kind: str, cause: str
) -> None:
    outcome = on_slurm(cluster, shared, kind, 0)
    outcome.assert_went_on(cause, (1, 2, 3, 4), undisturbed)
    assert "from step 9" in outcome.said


@pytest.mark.slow
def test_who_ends_a_job_during_its_recovery_has_ended_it(cluster: Cluster, shared: Path) -> None:
    job = submit(cluster, shared, "cut", "2", str(AT))
    wait_until(lambda: "the first cause" in output_of(shared, job))
    cluster.ok(["scancel", job], cwd=shared)
    # Slurm calls a job ended once all of its nodes have said so
    cluster.ok(["ip", "link", "set", "eth0", "up"], host="node3", cwd=shared)
    ended = cluster.wait(job, cwd=shared)
    assert ended.state == "CANCELLED"
    outcome = Outcome(ended.output, shared)
    assert (outcome.state["status"], outcome.state["step"]) == ("unfinished", 9)
    assert not (shared / "again").exists()
    assert_nothing_is_left(cluster)


def output_of(shared: Path, job: str) -> str:
    file = shared / f"job-{job}.out"
    return file.read_text() if file.exists() else ""


def under_mpirun(
    cluster: Cluster, shared: Path, mpi: Mpi, kind: str, struck: int, *asked: str, deaf: str = ""
) -> Outcome:
    """`hpcddp launch` on login, in a pretended PBS job on the nodes: the script's host is none of the ranks'. `deaf`: a
    host on which nothing can be started, and whoever tries waits for ever."""
    (shared / "nodes").write_text("".join(f"node{number}\n" for number in (1, 2, 3, 4)))
    (shared / "bin").mkdir()
    commands = {
        "remote": f"""for word; do
    case $word in {deaf or "nobody"}) exec sleep 600 ;; node?) break ;; esac
done
exec {RSH} "$@\"""",
        # as a real one it hangs where the host is silent
        "pbs_tmrsh": f'host=$1; shift; {shared}/bin/remote "$host" "$@" || [ $? != 255 ] || exec sleep 600',
        "pbs_release_nodes": f'echo "$*" >> {shared}/released',
    }
    for name, command in commands.items():
        (shared / "bin" / name).write_text(f"#!/bin/sh\n# a stand-in, no scheduler\n{command}\n")
        (shared / "bin" / name).chmod(0o755)
    env = mpi.env | {
        "PATH": f"{shared}/bin:{mpi.env['PATH']}",
        "PBS_NODEFILE": str(shared / "nodes"),
        "PBS_JOBID": "7.server",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "OMPI_MCA_plm_rsh_agent": f"{shared}/bin/remote",
        "PRTE_MCA_plm_ssh_agent": f"{shared}/bin/remote",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": f"{shared}/bin/remote",
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{shared}/bin/remote",
    }
    options = [word for setting in asked or ASKED for word in ("--set", setting)]
    size = ["--launcher", mpi.launcher, "--ranks-per-node", "1", "--walltime", "10m", "--name", "t"]
    train = [*STRUCK.split(), str(STEPS), kind, str(struck), str(AT)]
    done = cluster.sh(["hpcddp", "launch", *size, *options, "--", *train], cwd=shared, env=env)
    return Outcome(done.stdout + done.stderr, shared)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_under_each_mpirun_goes_on(
    cluster: Cluster, shared: Path, mpi: Mpi, fault: str, undisturbed: str
) -> None:
    kind, struck, cause, hosts = FAULTS[fault]
    under_mpirun(cluster, shared, mpi, kind, struck).assert_went_on(cause, hosts, undisturbed)
    released = shared / "released"
    assert released.exists() == (len(hosts) < 4)
    assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_a_job_under_each_mpirun_goes_on_after_all_processes_of_a_host_are_gone(
    cluster: Cluster, shared: Path, mpi: Mpi, undisturbed: str
) -> None:
    kind, struck, cause = KILLED_HOST
    under_mpirun(cluster, shared, mpi, kind, struck).assert_went_on(cause, (1, 2, 3, 4), undisturbed)


@pytest.mark.slow
def test_the_host_of_rank_0_may_be_the_lost_one(cluster: Cluster, shared: Path, mpi: Mpi, undisturbed: str) -> None:
    under_mpirun(cluster, shared, mpi, "cut", 0).assert_went_on("node1 is silent", (2, 3, 4), undisturbed)
    assert (shared / "released").read_text() == "-j 7.server node1\n"


@pytest.mark.slow
def test_a_start_up_that_never_meets_is_ended_and_the_deaf_host_is_left_out(
    cluster: Cluster, shared: Path, mpi: Mpi, undisturbed: str
) -> None:
    asked = ["max_restarts=2", "stall_limit=3s"]
    outcome = under_mpirun(cluster, shared, mpi, "none", 0, *asked, deaf="node3")
    assert outcome.starts in (["node1, node2, node4"], []), outcome.said
    assert outcome.causes, outcome.said
    assert re.search(r"no rank was started in 30 s|were not started|did not arrive|launcher ended", outcome.causes[0])
    assert "node3 is left out: it does not answer" in outcome.said
    assert (outcome.state["status"], outcome.state["step"]) == ("finished", STEPS), outcome.said
    assert outcome.state["weights_sha256"] == undisturbed
