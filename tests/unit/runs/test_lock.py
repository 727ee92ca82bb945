"""Two jobs never write one run, and no job that has ended keeps another one out."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.processes import find_machine, start_time
from hpcddp.runs.folder import RunFolder, list_numbered
from hpcddp.runs.lock import (
    HeldError,
    Holder,
    HolderEnd,
    describe_process,
    has_ended,
    is_held_by,
    read_holder_end,
    read_holds,
    release_run,
    take_run,
)
from tests.killing import kill_at_operation

MACHINE, HOST = find_machine(), os.uname().nodename
NO_PROCESS = 2**22 + 1  # above the kernel's highest number


def ask_nobody(_scheduler: str, _job: str) -> str | None:
    raise AssertionError("the scheduler is asked")


def here(attempt: str, process: int | None = None, **more: str) -> Holder:
    process = os.getppid() if process is None else process
    return describe_process(attempt, process, {}, ())._replace(**more)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "run"))


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that lives as long as the test."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_second_of_two_is_refused_with_who_holds_the_run(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper, job="41", scheduler="slurm"), ask_nobody)
    with pytest.raises(HeldError) as error:
        take_run(run, here("42"), ask_nobody)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"run {run.path} is in use by job 41 on {HOST} (process {sleeper}, since ")
    assert second == "hint: wait for its end; or a run of its own: --name X, or another run_dir"
    assert is_held_by(run, "41")
    assert not is_held_by(run, "42")


def test_a_run_that_was_released_is_free_and_only_its_holder_releases_it(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper), ask_nobody)
    release_run(run, "42")
    with pytest.raises(HeldError):
        take_run(run, here("42"), ask_nobody)
    release_run(run, "41")
    assert not is_held_by(run, "41")
    take_run(run, here("42"), ask_nobody)
    assert [hold.holder.attempt for hold in read_holds(run)] == ["41", "42"]


def test_how_a_holder_has_ended_is_written_where_no_room_is_left(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper), ask_nobody)
    path = Path(list_numbered(run.holders)[-1])
    room = os.stat(path / "ended.tmp")
    release_run(run, "41", 1, "", "rank 0: OSError: [Errno 28] No space left on device — \N{SNOWMAN}" + 2000 * "x")
    ended = os.stat(path / "ended")
    assert (ended.st_ino, ended.st_size) == (room.st_ino, room.st_size)  # no byte more than it had
    end = read_holder_end(str(path))
    assert end is not None
    assert (end.status, end.signal) == (1, "")
    assert end.cause.startswith("rank 0: OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("said", "status", "by"),
    [("0\n", 0, ""), ("138 SIGTERM\n", 138, "SIGTERM"), (" SIGKILL\n", None, "SIGKILL"), ("", None, "")],
)
def test_what_a_holder_has_said_at_its_end_is_read(tmp_path: Path, said: str, status: int | None, by: str) -> None:
    (tmp_path / "ended").write_text(said)
    assert read_holder_end(str(tmp_path)) == HolderEnd(status, by)


def test_a_process_of_this_machine_that_is_gone_holds_nothing(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper)._replace(started="1"), ask_nobody)  # the number is another process's now
    take_run(run, here("42", NO_PROCESS, started="9", job="9", scheduler="pbs"), ask_nobody)
    take_run(run, here("43", sleeper), ask_nobody)
    assert is_held_by(run, "43")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "is in use by job 41 on node7"),
        ("queued", "is in use by job 41 on node7"),
        (None, "cannot be found out on this host\nhint: if it has ended: touch "),
    ],
)
def test_elsewhere_the_scheduler_says_whether_the_job_has_ended(run: RunFolder, state: str | None, words: str) -> None:
    other = Holder("41", "node7", "other", 7, "7", "pbs", "41", (), "now")
    take_run(run, other, ask_nobody)
    with pytest.raises(HeldError, match=words):
        take_run(run, here("42"), lambda scheduler, job: {("pbs", "41"): state}[scheduler, job])
    assert not is_held_by(run, "42")
    take_run(run, here("42"), lambda _scheduler, _job: "gone")


def test_what_the_hint_says_releases_a_run(run: RunFolder) -> None:
    take_run(run, Holder("local-1", "laptop", "other", 7, "7"), ask_nobody)
    with pytest.raises(HeldError) as error:
        take_run(run, here("42"), ask_nobody)
    Path(error.value.hint.partition("touch ")[2].partition(";")[0]).touch()
    take_run(run, here("42"), ask_nobody)


def test_the_words_of_the_holder_are_told_where_they_differ(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper)._replace(command=("python", "train.py", "--lr", "1")), ask_nobody)
    for command, told in (
        (("python", "train.py", "--lr", "1"), ""),
        (("python", "a b"), "; it runs python train.py --lr 1, and this is python 'a b'"),
    ):
        with pytest.raises(HeldError) as error:
            take_run(run, here("42")._replace(command=command), ask_nobody)
        assert error.value.message.partition("holds a run")[2] == told


@pytest.mark.parametrize(
    ("held", "mine", "ended"),
    [
        ("41.1", "41.2", True),  # the supervisor begins the next one when it has ended this one, or cut it off
        ("41.1", "41.1", True),  # the launcher has started the ranks again, and rank 0 is elsewhere
        ("41.2", "41.1", None),
        ("41-launch7.1", "41-launch8.1", None),  # two by hand, in one allocation
        ("41-launch7.1", "41-launch7.2", True),
        ("local-1", "local-2", None),  # srun alone, twice in one job
    ],
)
def test_of_one_job_s_attempts_the_later_one_holds_the_run(run: RunFolder, held: str, mine: str, ended: bool | None):
    job = {"job": "41", "scheduler": "slurm"}
    holder = Holder(held, "node7", "other", 7, "7", **job)
    assert has_ended(holder, here(mine, **job), ask_nobody) is ended


def test_a_job_of_a_chain_follows_the_one_that_queued_it_without_a_question(run: RunFolder) -> None:
    take_run(run, Holder("41", "node7", "other", 7, "7", "slurm", "41"), ask_nobody)
    take_run(run, here("42", job="42", scheduler="slurm"), ask_nobody, before="41")
    assert is_held_by(run, "42")


def test_a_host_that_has_started_anew_has_no_process_of_before(run: RunFolder) -> None:
    boot, _, space = MACHINE.partition(" ")
    take_run(run, Holder("local-1", HOST, f"before {space}", 1, start_time(1)), ask_nobody)
    take_run(run, Holder("local-2", HOST, f"{boot} another-space", 1, start_time(1)), ask_nobody)
    with pytest.raises(HeldError):  # another process namespace cannot be looked into
        take_run(run, here("local-3"), ask_nobody)


def test_a_holder_that_cannot_be_read_is_refused_and_named(run: RunFolder, sleeper: int) -> None:
    take_run(run, here("41", sleeper), ask_nobody)
    path = Path(list_numbered(run.holders)[-1], "holder.json")
    path.write_text("{")
    with pytest.raises(HeldError, match="does not say who holds the run\nhint: if nobody does: touch"):
        take_run(run, here("42"), ask_nobody)


def _take_and_release(run: RunFolder) -> None:
    mine = here(f"local-{os.getpid()}", os.getpid())
    take_run(run, mine, ask_nobody)
    release_run(run, mine.attempt)


def test_a_kill_at_any_operation_keeps_nobody_out_and_leaves_every_holder_readable(run: RunFolder) -> None:
    for kills in itertools.count():
        pid = os.fork()
        if pid == 0:
            kill_at_operation(kills)
            _take_and_release(run)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        _take_and_release(run)
    assert kills > 6
    assert len(read_holds(run)) == len(list_numbered(run.holders))  # none is half there


def test_what_killed_writers_have_left_goes_when_the_run_is_taken(run: RunFolder) -> None:
    """Of each form: one file or sharded (a host's process), a framework's (an attempt), and a removal's."""
    dead = [f"step-00000005.tmp-{HOST}.{NO_PROCESS}", "step-00000006.tmp-elsewhere.7", "step-00000007.tmp-41.pbs1.1"]
    dead += ["step-00000001.old-7"]
    stays = ["step-00000004", "step-00000003.damaged-7", "mine.tmp-7", "best.json"]
    for name in (*dead, *stays):
        Path(run.checkpoints, name).mkdir(parents=True)
        Path(run.checkpoints, name, "state.pt").write_text("…")
    take_run(run, here("41", NO_PROCESS), ask_nobody)
    assert sorted(os.listdir(run.checkpoints)) == sorted(stays)
