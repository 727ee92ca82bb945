"""Whether a job goes on, and where: decisions by what has happened before, hosts by stand-ins for their starters."""

from __future__ import annotations

import json
import os
import shutil
import time
import typing
from pathlib import Path

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.state import RunState, read_state, replace_state
from hpcddp.schedulers.registry import CurrentJob
from hpcddp.supervisor.events import ERROR, GONE, KILLED, SILENT, STUCK, UNHEARD, UNKNOWN, Event
from hpcddp.supervisor.follow import EndTime
from hpcddp.supervisor.order import LaunchLine, Order
from hpcddp.supervisor.rank import NOWHERE
from hpcddp.supervisor.recovery import Recovery
from hpcddp.supervisor.supervise import _is_finished

# Starts a command on a host of a pretended cluster: one that is in `silent` hangs.
# As pbs_tmrsh it has no shell; `ssh` gives one all the words.
_STARTER = """#!/bin/sh
# a stand-in, no scheduler
while [ "$1" = -o ]; do shift 2; done
echo "$*" >> "$CLUSTER/asked"
host=$1
shift
[ ! -e "$CLUSTER/silent-$host" ] || exit 255
export PATH="$CLUSTER/bin-$host:$PATH"
case $0 in *ssh) exec sh -c "$*" ;; esac
exec "$@"
"""
_GPUS = """\
case $1 in
-L) for gpu in {gpus}; do echo "GPU $gpu: NVIDIA H200 (UUID: GPU-$gpu)"; done ;;
-q) echo "        Pending                           : {pending}" ;;
esac
"""
_RELEASE = (
    '#!/bin/sh\necho "$*" >> "$CLUSTER/released"\n[ ! -e "$CLUSTER/keeps" ] || { echo "not today" >&2; exit 1; }\n'
)
LATER = EndTime(int(time.time()) + 100_000, "")
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
            "HPCDDP_RUN_DIR": str(folder / "runs/t"),
        }
        self.attempt: AttemptFolder = RunFolder(str(folder / "runs/t")).attempt("7.server.1")
        os.makedirs(self.attempt.path)

    def recovery(self, *, gpus: int = 0, **asked: typing.Any) -> Recovery:
        *fewer, nodes = asked.pop("fits", (2, 3, 4))
        line = LaunchLine((), ("python", "t.py"), nodes, ranks_per_node=2, gpus_per_node=gpus)
        return Recovery(
            Order("pbs", "openmpi", line, **{"max_restarts": 9, "fewer_nodes": tuple(fewer), **asked}),
            CurrentJob("pbs", "7.server", "7.server"),
            self.env,
            self.told.append,
        )

    def goes_on(self, recovery: Recovery, cause: Event, *lost: str, end: EndTime = LATER) -> bool:
        """Whether the ranks are started again, or `why_not`; after it has lost these hosts."""
        self.why_not = recovery.prepare_restart(self.attempt, cause, end, {*lost})
        return not self.why_not

    def give(self, host: str, program: str, text: str) -> None:
        """A stand-in for a program of one host."""
        folder = self.folder / f"bin-{host}.site"
        folder.mkdir(exist_ok=True)
        (folder / program).write_text(f"#!/bin/sh\n# a stand-in\n{text}\n")
        (folder / program).chmod(0o755)

    def give_gpus(self, host: str, gpus: int, pending: str = "No") -> None:
        self.give(host, "nvidia-smi", _GPUS.format(gpus=" ".join(map(str, range(gpus))), pending=pending))

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
    assert cluster.goes_on(recovery, KILL)
    assert recovery.chosen == ("n1.site", "n2.site", "n3.site", "n4.site")
    recovery.begin_again(cluster.attempt)
    assert cluster.told == [
        "the first cause: rank 2 on n3 was killed by SIGKILL (often: out of memory)",
        "start 2 of at most 10 on n1.site, n2.site, n3.site, n4.site, from step 9",
    ]
    assert cluster.lines("released") == []


def test_a_host_that_is_gone_is_left_out_and_given_back(cluster: Cluster):
    (cluster.folder / "silent-n3.site").touch()
    recovery = cluster.recovery()
    assert cluster.goes_on(recovery, LOST, "n3")
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")
    assert cluster.lines("released") == ["-j 7.server n3"], "without an answer of qstat: its first label"
    asked = [line for line in cluster.lines("asked") if line.endswith(" true")]
    assert sorted(asked) == [f"n{i}.site true" for i in (1, 2, 3, 4)]  # its silence was the other word
    assert "n3.site is left out: it does not answer" in cluster.told


def test_a_host_is_given_back_by_the_names_that_the_scheduler_itself_has_for_it(cluster: Cluster):
    (cluster.folder / "silent-n3.site").touch()
    vnodes = "(n1:ncpus=8)+(n2:ncpus=8)+(n3[0]:ngpus=4:ncpus=4+n3[1]:ngpus=4:ncpus=4)+(n4:ncpus=8)"
    job = {"job_state": "R", "exec_host": "n1/0*8+n2/0*8+n3/0*0+n4/0*8", "exec_vnode": vnodes}
    (cluster.folder / "qstat").write_text(f"#!/bin/sh\necho '{json.dumps({'Jobs': {'7.server': job}})}'\n")
    (cluster.folder / "qstat").chmod(0o755)
    assert cluster.goes_on(cluster.recovery(), LOST, "n3")
    assert cluster.lines("released") == ["-j 7.server n3[0] n3[1]"]


def test_a_host_that_only_the_starter_does_not_reach_is_asked_twice(cluster: Cluster):
    (cluster.folder / "silent-n2.site").touch()
    assert cluster.goes_on(cluster.recovery(), KILL)
    assert cluster.lines("asked").count("n2.site true") == 2
    assert cluster.lines("released") == ["-j 7.server n2"]


def test_a_starter_that_reaches_no_host_is_not_believed(cluster: Cluster):
    for i in (1, 2, 3, 4):
        (cluster.folder / f"silent-n{i}.site").touch()
    recovery = cluster.recovery()
    assert cluster.goes_on(recovery, KILL)
    assert len(recovery.chosen) == 4
    assert "no host answers pbs_tmrsh, which may not work here" in cluster.told
    assert cluster.goes_on(recovery, LOST, "n3")
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


def test_without_any_starter_what_the_ranks_said_decides(cluster: Cluster):
    cluster.env["PATH"] = "/nowhere"
    recovery = cluster.recovery()
    assert cluster.goes_on(recovery, LOST, "n3")
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("id", "the job file's own check failed"),
        ("touch", "it does not see the run folder, or cannot write to it"),
        ("head", "it cannot read the newest checkpoint"),
    ],
)
def test_a_host_on_which_a_check_fails_is_left_out_but_stays_in_the_job(cluster: Cluster, program: str, why: str):
    cluster.reach(9)
    (cluster.folder / "runs/t/checkpoints/step-00000009/manifest.json").write_text("{}")
    cluster.give("n2", program, "exit 1")
    recovery = cluster.recovery(preflight="id")
    assert cluster.goes_on(recovery, KILL)
    assert recovery.chosen == ("n1.site", "n3.site", "n4.site")
    assert f"n2.site is left out: {why}" in cluster.told
    assert cluster.lines("released") == []
    assert not [*Path(cluster.attempt.run.path).glob(".written*")]


def test_a_preflight_is_one_line_of_shell_for_ssh_too(cluster: Cluster):
    (cluster.folder / "pbs_tmrsh").rename(cluster.folder / "ssh")
    recovery = cluster.recovery(preflight='test "$(echo a b | wc -w)" = 2')
    assert cluster.goes_on(recovery, KILL)
    assert len(recovery.chosen) == 4, cluster.told


def test_a_host_with_too_few_gpus_or_one_that_needs_a_reset_is_left_out(cluster: Cluster):
    for host, gpus, pending in (("n1", 8, "No"), ("n2", 7, "No"), ("n3", 8, "Yes"), ("n4", 8, "No")):
        cluster.give_gpus(host, gpus, pending)
    recovery = cluster.recovery(gpus=8)
    assert cluster.goes_on(recovery, KILL)
    assert recovery.chosen == ("n1.site", "n4.site"), cluster.told
    assert "n3.site is left out: it does not have the job's GPUs, or one of them needs a reset" in cluster.told


def test_a_check_of_ours_that_fails_on_every_host_is_not_believed(cluster: Cluster):
    for host in ("n1", "n2", "n3", "n4"):
        cluster.give_gpus(host, 4)  # each is cut in two, say
    recovery = cluster.recovery(gpus=8)
    assert cluster.goes_on(recovery, KILL)
    assert len(recovery.chosen) == 4
    assert (
        "a check fails on each host (it does not have the job's GPUs, or one of them needs a reset)" in cluster.told[1]
    )


def test_what_an_attempt_has_left_is_the_next_one_s(cluster: Cluster):
    cluster.reach(500)
    replace_state(cluster.attempt.run, RunState("unfinished", 500, 1, "lost", cluster.attempt.name))
    again = cluster.recovery().begin_again(cluster.attempt)
    state = read_state(again.run)
    assert state is not None
    assert (state.attempt, state.step, state.status) == (again.name, 500, "unfinished")


def test_a_run_that_another_job_has_taken_is_not_started_again(cluster: Cluster):
    recovery = cluster.recovery()
    shutil.rmtree(cluster.attempt.run.path)
    Path(cluster.attempt.run.path).write_text("no folder")
    with pytest.raises(HpcddpError):
        recovery.begin_again(cluster.attempt)


ECC = Event(ERROR, 2, "n3", status=1 << 8, text="RuntimeError: CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize("cause", [KILL, ECC], ids=["killed", "error"])
def test_a_host_that_was_blamed_twice_is_left_out_if_it_works_out_without(cluster: Cluster, cause: Event):
    recovery, needed = cluster.recovery(), cluster.recovery(fits=(4,))
    for step in (3, 6):
        cluster.reach(step)
        assert cluster.goes_on(recovery, cause)
        assert cluster.goes_on(needed, cause)
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")
    assert len(needed.chosen) == 4


@pytest.mark.parametrize(
    "cause",
    [
        Event(ERROR, 0, "n3", status=4 << 8, text="2 of 8 ranks did not arrive in 300 s: rank 2, 3"),
        Event(STUCK, 2, "n3", text=NOWHERE, is_sure=False),
        Event(UNHEARD, 2, "n3", text="45"),
    ],
)
def test_what_names_no_host_for_sure_blames_none(cluster: Cluster, cause: Event):
    recovery = cluster.recovery()
    assert all(cluster.goes_on(recovery, cause) for _ in range(3))
    assert len(recovery.chosen) == 4


def test_spare_nodes_wait_and_then_take_the_place_of_lost_ones(cluster: Cluster):
    recovery = cluster.recovery(fits=(3,))
    assert recovery.chosen == ("n1.site", "n2.site", "n3.site")
    (cluster.folder / "silent-n3.site").touch()
    assert cluster.goes_on(recovery, LOST, "n3")
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")


def test_too_few_hosts_end_the_job(cluster: Cluster):
    (cluster.folder / "silent-n3.site").touch()
    recovery = cluster.recovery(fits=(4,))
    assert not cluster.goes_on(recovery, LOST, "n3")
    assert cluster.why_not == "of 4 hosts 3 can be used, and this job can go on with 4"


REPEATS = "an earlier start ended the same way, on the same hosts and without a new checkpoint"
BUG_AT_3 = Event(ERROR, 2, "n1", step=3, status=1 << 8, text="ValueError: a")  # the script's host is never left out
STUCK_AT_3 = Event(STUCK, 2, "n1", step=3, text="stands at train.py:9, in main: time.sleep(1000)")


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        ([(BUG_AT_3, 0), (BUG_AT_3, 0)], False),
        ([(BUG_AT_3, 2), (BUG_AT_3._replace(rank=0), 2)], False),
        ([(BUG_AT_3, 0), (BUG_AT_3._replace(step=4), 0), (BUG_AT_3, 0)], False),
        ([(STUCK_AT_3, 2), (STUCK_AT_3, 2)], False),
        ([(KILL._replace(host="n1", step=3), 2), (KILL._replace(host="n1", step=3), 2)], False),
        ([(LOST._replace(host="n1"), 2), (LOST._replace(host="n1"), 2)], False),
        ([(KILL._replace(host="n1"), 2), (KILL._replace(host="n1"), 2)], False),  # as it loads the checkpoint
        ([(BUG_AT_3, 0), (BUG_AT_3._replace(step=4), 0)], True),
        ([(BUG_AT_3, 0), (BUG_AT_3._replace(text="ValueError: b"), 0)], True),
        ([(BUG_AT_3, 0), (STUCK_AT_3, 0)], True),
        ([(BUG_AT_3, 0), (BUG_AT_3, 2)], True),
        ([(STUCK_AT_3, 2), (STUCK_AT_3, 3)], True),
        ([(KILL._replace(host="n1"), 0)] * 4, True),  # a program that does not say how far it is
        ([(Event(STUCK, 2, "n1", text=NOWHERE, is_sure=False), 0)] * 4, True),
        ([(Event(UNKNOWN, -1, "", status=137, text="the launcher ended with status 137"), 0)] * 4, True),
    ],
)
def test_ranks_are_started_again_as_long_as_something_is_different(
    cluster: Cluster, ends: list[tuple[Event, int]], *, goes_on: bool
):
    recovery, saved, found = cluster.recovery(), 0, list[bool]()
    for end, newest in ends:
        if newest != saved:
            cluster.reach(newest)
        saved = newest
        found.append(cluster.goes_on(recovery, end))
    assert found == [*[True] * (len(ends) - 1), goes_on]
    if not goes_on:
        assert cluster.why_not == REPEATS


@pytest.mark.parametrize("cause", [BUG_AT_3._replace(step=0), KILL._replace(host="n1", status=11)])
def test_the_same_error_of_a_program_that_says_nothing_of_its_progress_is_tried_once_more(
    cluster: Cluster, cause: Event
):
    recovery = cluster.recovery()
    assert [cluster.goes_on(recovery, cause) for _ in range(2)] == [True, False]
    assert cluster.why_not == REPEATS


def test_what_comes_again_on_one_host_is_tried_once_more_without_it(cluster: Cluster):
    recovery, bug = cluster.recovery(), BUG_AT_3._replace(host="n3")
    assert [cluster.goes_on(recovery, bug) for _ in range(2)] == [True, True]
    assert recovery.chosen == ("n1.site", "n2.site", "n4.site")
    assert not cluster.goes_on(recovery, bug._replace(host="n4"))


def test_ranks_are_started_again_max_restarts_times(cluster: Cluster):
    recovery = cluster.recovery()
    for _ in range(9):
        assert cluster.goes_on(recovery, KILL)
        recovery.begin_again(cluster.attempt)
    assert not cluster.goes_on(recovery, KILL)
    assert cluster.why_not == "they were already, 9 times (max_restarts)"


CRASH, CLEAN_UP, BUG = KILL._replace(status=11), KILL._replace(status=15), Event(ERROR, 1, "n1", status=1 << 8)


def test_what_happens_to_ranks_whose_run_has_finished_does_not_matter_but_for_a_loss(cluster: Cluster):
    replace_state(cluster.attempt.run, RunState("finished", 9, 1, "done", cluster.attempt.name))
    silent, gone = Event(SILENT, 1, "n1"), Event(GONE, 1, "n1")
    assert [_is_finished(cluster.attempt, cause) for cause in (CRASH, CLEAN_UP, BUG)] == [True] * 3
    assert [_is_finished(cluster.attempt, cause) for cause in (KILL, silent, gone)] == [False] * 3


@pytest.mark.parametrize(
    ("cause", "end", "why"),
    [
        (KILL, EndTime(int(time.time()) + 30, ""), "the job ends soon"),
        (Event(ERROR, 0, "n1", status=2 << 8, text="no such option"), LATER, "that is no node's fault"),
        (Event(ERROR, 0, "n1", status=127 << 8), LATER, "that is no node's fault"),
    ],
)
def test_what_another_start_would_not_help_is_not_started_again(cluster: Cluster, cause: Event, end: EndTime, why: str):
    assert not cluster.goes_on(cluster.recovery(), cause, end=end)
    assert cluster.why_not == why
