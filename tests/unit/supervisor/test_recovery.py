"""Whether a job goes on, and where: decisions by what has happened before, hosts by stand-ins for their starters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.supervisor.events import ERROR, KILLED, SILENT, UNKNOWN, Event
from hpcddp.supervisor.job import End, Job, MovingEnd, find_end
from hpcddp.supervisor.order import Order, Recover
from hpcddp.supervisor.recovery import Recovery

# Starts a command on a host of a pretended cluster: one that is in `silent` hangs, one that is in `sick` is ill.
_STARTER = """#!/bin/sh
# a stand-in, no scheduler
echo "$*" >> "$CLUSTER/asked"
[ ! -e "$CLUSTER/silent-$1" ] || exit 255
[ "$2" != sh ] || [ ! -e "$CLUSTER/sick-$1" ]
"""
_RELEASE = (
    '#!/bin/sh\necho "$*" >> "$CLUSTER/released"\n[ ! -e "$CLUSTER/keeps" ] || { echo "not today" >&2; exit 1; }\n'
)
LATER = End(int(time.time()) + 100_000, "")
KILL = Event(KILLED, 2, "n3", status=9)
LOST = Event(SILENT, 2, "n3", step=12)


class Cluster:
    """A pretended PBS job on four hosts, and what people are told of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[str]()
        (folder / "nodes").write_text("n1.site\nn2.site\nn3.site\nn4.site\n")
        for name, text in {"pbs_tmrsh": _STARTER, "pbs_release_nodes": _RELEASE}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.env = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "CLUSTER": str(folder),
            "PBS_JOBID": "7.server",
            "PBS_NODEFILE": str(folder / "nodes"),
            "PBS_ENVIRONMENT": "PBS_BATCH",
        }
        self.attempt: AttemptFolder = RunFolder(str(folder / "runs/t")).attempt("7.server.1")
        os.makedirs(self.attempt.path)

    def recovery(self, **asked: object) -> Recovery:
        recover = Recover(**{"restarts": 9, "fits": (2, 3, 4), **asked})
        plan = {"scheduler": "pbs", "command": ["python", "t.py"], "nodes": 4, "ranks_per_node": 2}
        return Recovery(
            Order("", plan, "openmpi", recover=recover),
            recover,
            Job("pbs", "7.server", "7.server"),
            self.env,
            self.told.append,
        )

    def reach(self, step: int) -> None:
        (self.folder / f"runs/t/checkpoints/step-{step:08d}").mkdir(parents=True)

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    return Cluster(tmp_path)


def test_a_killed_rank_goes_on_where_it_was(cluster: Cluster):
    cluster.reach(9)
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, KILL, LATER, set())
    assert recovery.chosen == ("n1.site", "n2.site", "n3.site", "n4.site")
    assert cluster.told == [
        "the first cause: rank 2 on n3 was killed by SIGKILL (often: out of memory)",
        "start 2 of at most 10 on n1.site, n2.site, n3.site, n4.site, from step 9",
    ]
    assert cluster.lines("released") == []


def test_a_host_that_is_gone_is_left_out_and_given_back(cluster: Cluster):
    (cluster.folder / "silent-n3.site").touch()
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")
    assert cluster.lines("released") == ["-j 7.server n3.site"]
    assert sorted(cluster.lines("asked")) == [f"n{i}.site true" for i in (1, 2, 3, 4)]  # its silence was the other word
    assert "n3.site is left out: it does not answer" in cluster.told


def test_a_host_that_only_the_starter_does_not_reach_is_asked_twice(cluster: Cluster):
    (cluster.folder / "silent-n2.site").touch()
    assert cluster.recovery().goes_on(cluster.attempt, KILL, LATER, set())
    assert cluster.lines("asked").count("n2.site true") == 2
    assert cluster.lines("released") == ["-j 7.server n2.site"]


def test_a_scheduler_that_keeps_a_lost_host_is_told_of(cluster: Cluster):
    for name in ("silent-n3.site", "keeps"):
        (cluster.folder / name).touch()
    assert cluster.recovery().goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert "the scheduler did not take n3.site out of the job, and may end it: not today" in cluster.told


def test_a_starter_that_reaches_no_host_is_not_believed(cluster: Cluster):
    for i in (1, 2, 3, 4):
        (cluster.folder / f"silent-n{i}.site").touch()
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, KILL, LATER, set())
    assert len(recovery.chosen) == 4
    assert "no host answers pbs_tmrsh, which may not work here" in cluster.told
    assert recovery.goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


def test_without_any_starter_what_the_ranks_said_decides(cluster: Cluster):
    cluster.env["PATH"] = "/nowhere"
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


def test_a_host_that_fails_its_health_check_is_left_out_but_stays_in_the_job(cluster: Cluster):
    (cluster.folder / "sick-n2.site").touch()
    recovery = cluster.recovery(health="nvidia-smi -q | grep healthy")
    assert recovery.goes_on(cluster.attempt, KILL, LATER, set())
    assert recovery.chosen == ("n1.site", "n3.site", "n4.site")
    assert "n2.site is left out: its health check failed" in cluster.told
    assert cluster.lines("released") == []


def test_a_host_that_was_blamed_twice_is_left_out_if_it_works_out_without(cluster: Cluster):
    recovery = cluster.recovery()
    for step in (3, 6):
        cluster.reach(step)
        assert recovery.goes_on(cluster.attempt, KILL, LATER, set())
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")
    needed = cluster.recovery(fits=(4,))
    for step in (9, 12):
        cluster.reach(step)
        assert needed.goes_on(cluster.attempt, KILL, LATER, set())
    assert len(needed.chosen) == 4


def test_spare_nodes_wait_and_then_take_the_place_of_lost_ones(cluster: Cluster):
    recovery = cluster.recovery(fits=(3,), spares=1)
    assert recovery.chosen == ("n1.site", "n2.site", "n3.site")
    (cluster.folder / "silent-n3.site").touch()
    assert recovery.goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


def test_too_few_hosts_end_the_job(cluster: Cluster):
    (cluster.folder / "silent-n3.site").touch()
    recovery = cluster.recovery(fits=(4,))
    assert not recovery.goes_on(cluster.attempt, LOST, LATER, {"n3"})
    assert cluster.told[-1] == (
        "the ranks are not started again: of 4 hosts 3 can be used, and this job can go on with 4"
    )


ERROR_AT = {step: Event(ERROR, 2, "n3", step=step, status=1 << 8, text="ValueError: a") for step in (3, 4, 5, 6)}


def why_not(cluster: Cluster) -> str:
    return cluster.told[-1].removeprefix("the ranks are not started again: ")


def test_the_same_error_at_the_same_step_is_a_bug(cluster: Cluster):
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, ERROR_AT[3], LATER, set())
    assert not recovery.goes_on(cluster.attempt, ERROR_AT[3], LATER, set())
    assert why_not(cluster) == "the same error came twice at step 3: it would come again"


def test_errors_at_other_steps_end_the_job_once_two_starts_made_no_progress(cluster: Cluster):
    recovery = cluster.recovery()
    for step in (3, 4):
        assert recovery.goes_on(cluster.attempt, ERROR_AT[step], LATER, set())
    assert not recovery.goes_on(cluster.attempt, ERROR_AT[5], LATER, set())
    assert why_not(cluster) == "two starts have made no progress beyond step 0"
    with_progress = cluster.recovery()
    for step in (3, 4, 5, 6):
        cluster.reach(step)
        assert with_progress.goes_on(cluster.attempt, ERROR_AT[step], LATER, set())


def test_lost_ranks_are_no_fault_of_the_program_however_often(cluster: Cluster):
    recovery = cluster.recovery()
    assert all(recovery.goes_on(cluster.attempt, KILL, LATER, set()) for _ in range(9))
    assert not recovery.goes_on(cluster.attempt, KILL, LATER, set())
    assert why_not(cluster) == "they were already, 9 times (max_restarts)"


@pytest.mark.parametrize(
    ("cause", "end", "why"),
    [
        (KILL, End(int(time.time()) + 30, ""), "the job ends soon"),
        (Event(ERROR, 0, "n1", status=2 << 8, text="no such option"), LATER, "that is no node's fault"),
        (Event(ERROR, 0, "n1", status=127 << 8), LATER, "that is no node's fault"),
    ],
)
def test_what_another_start_would_not_help_is_not_started_again(cluster: Cluster, cause: Event, end: End, why: str):
    assert not cluster.recovery().goes_on(cluster.attempt, cause, end, set())
    assert why_not(cluster) == why


def test_a_launcher_that_failed_by_itself_is_started_again_once(cluster: Cluster):
    failed = Event(UNKNOWN, -1, "", text="the launcher ended with status 213")
    recovery = cluster.recovery()
    assert recovery.goes_on(cluster.attempt, failed, End(None, ""), set())
    assert not recovery.goes_on(cluster.attempt, failed, End(None, ""), set())


def test_the_end_of_a_job_follows_a_walltime_that_is_changed(cluster: Cluster):
    told = "job_state = R\n    stime = Sat Nov 21 01:12:37 2026\n    Resource_List.walltime = {}\n"
    answer = cluster.folder / "answer"
    (cluster.folder / "qstat").write_text(f"#!/bin/sh\n# a stand-in, no scheduler\ncat {answer}\n")
    (cluster.folder / "qstat").chmod(0o755)
    answer.write_text(told.format("01:00:00"))
    job, now = Job("pbs", "7.server", "7.server"), [0.0]
    end = find_end(job, cluster.env, 60, by_hand=False)
    assert end.source == "as qstat says"
    assert end.at is not None
    moving = MovingEnd(job, end, cluster.env, lambda: now[0])
    answer.write_text(told.format("02:00:00"))
    assert not moving.look()  # not every second
    now[0] = 301.0
    assert moving.look()
    assert moving.end == End(end.at + 3600, "as qstat says")
    now[0] = 602.0
    assert not moving.look()
    answer.write_text("")  # a server that is away says nothing
    now[0] = 903.0
    assert not moving.look()
    assert moving.end.at == end.at + 3600
