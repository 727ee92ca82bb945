"""The scheduler is asked in a thread: the supervisor does not wait for what it says."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hpcddp.schedulers.registry import CurrentJob
from hpcddp.supervisor.follow import POLL_S, EndTime, FollowUp, MovingEnd, RepeatedQuestion, find_end, stop_on_request

# It does not answer before it is told what.
_QSTAT = """\
echo "$*" >> "$CLUSTER/asked"
until [ -e "$CLUSTER/answer" ]; do sleep 0.02; done
cat "$CLUSTER/answer"
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "CLUSTER": str(folder)}
        self.add("qstat", _QSTAT)

    def add(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n# a stand-in, no scheduler\n{script}")
        (self.folder / name).chmod(0o755)

    def answers(self, text: str) -> None:
        """What qstat says from now on."""
        (self.folder / "answer.new").write_text(text)
        (self.folder / "answer.new").rename(self.folder / "answer")

    def runs_since(self, began: str, walltime: str) -> None:
        job = {"job_state": "R", "stime": began, "Resource_List": {"walltime": walltime}}
        self.answers(json.dumps({"Jobs": {"7.server": job}}))

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_end_of_a_job_follows_a_walltime_that_is_changed(cluster: Cluster):
    cluster.runs_since("Sat Nov 21 01:12:37 2026", "01:00:00")
    job, now = CurrentJob("pbs", "7.server", "7.server"), [0.0]
    end = find_end(job, cluster.env, 60, by_hand=False)
    assert end.source == "as qstat says"
    assert end.at is not None
    moving = MovingEnd(job, end, cluster.env, lambda: now[0])

    def look() -> bool:
        now[0] += 301
        return moving.poll()

    cluster.answers("")  # a server that is away says nothing
    asked = len(cluster.lines("asked"))
    assert not moving.poll()  # not every second
    assert len(cluster.lines("asked")) == asked
    wait_until(lambda: look() or len(cluster.lines("asked")) > asked + 2)
    assert moving.end == end
    (cluster.folder / "answer").unlink()
    assert not look()  # and does not wait
    cluster.runs_since("Sat Nov 21 01:12:37 2026", "02:00:00")
    wait_until(look)
    assert moving.end == EndTime(end.at + 3600, "as qstat says")


def test_what_is_left_of_an_allocation_is_no_end_of_its_own(cluster: Cluster):
    now = int(time.time())
    began = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now))
    cluster.runs_since(began, "01:00:00")
    job = CurrentJob("pbs", "7.server", "7.server")
    script_s = (find_end(CurrentJob("local", "", "x"), cluster.env, 0, by_hand=False).at or 0) - now
    left_s = 3600 - script_s
    assert find_end(job, cluster.env, left_s - 2, by_hand=True) == EndTime(now + 3600, "as qstat says")
    assert find_end(job, cluster.env, left_s - 60, by_hand=True).source == "as the script says"


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_ends_a_job_with_a_chain_need_not_wait_for_the_scheduler(cluster: Cluster):
    cluster.add("qdel", 'echo "$*" >> "$CLUSTER/deleted"\n')
    told = list[str]()
    follow_up = FollowUp(
        CurrentJob("pbs", "7.server", "7.server"), EndTime(int(time.time()) + 7200, ""), cluster.env, told.append
    )
    follow_up.id = "8.server"
    follow_up.receive(signal.SIGTERM)
    follow_up.receive(signal.SIGTERM)
    assert told == []
    cluster.answers('{"Jobs": {"7.server": {"job_state": "R"}}}')
    follow_up.cancel("nothing is left to do")
    assert cluster.lines("deleted") == ["8.server"]
    assert told == ["somebody ends this job long before its end, and with it the chain: 8.server is cancelled"]


def test_a_run_folder_that_hangs_does_not_keep_the_supervisor_from_hearing_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers, looks, now = threading.Event(), list[str](), [10.0]

    def exists(path: str) -> bool:
        looks.append(path)
        return not answers.wait(300)

    monkeypatch.setattr("hpcddp.supervisor.follow.os.path.exists", exists)
    request = RepeatedQuestion(partial(stop_on_request, str(tmp_path / "stop")), POLL_S, lambda: now[0])
    for _ in range(3):
        request.poll()
        now[0] += 100
    wait_until(lambda: looks != [])
    assert len(looks) == 1
    answers.set()
    wait_until(lambda: request.poll() or len(looks) > 1)
