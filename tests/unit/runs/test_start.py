"""A run is its folder: what is in the folder says what a start does, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.errors import RequestError
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import HeldError, read_holds, release_run
from hpcddp.runs.start import Outlook, RunRequest, inspect_run, read_about, set_run_aside, start_run
from hpcddp.runs.state import write_state

COMMAND = ("python", "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "train")


@pytest.fixture
def another() -> Iterator[int]:
    """A process that lives as long as the test."""
    pid = os.fork()
    if pid == 0:
        import signal

        signal.pause()
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def begin(request: RunRequest, attempt: str = "local-1", *, process: int = 0) -> Outlook:
    return start_run(request, attempt, {}, process=process or os.getpid())


def leave(folder: str, status: str, step: int, *, attempt: str = "local-1", saved: bool = True) -> RunFolder:
    """What an attempt leaves that has ended so."""
    run = RunFolder(folder)
    if saved:
        os.makedirs(os.path.join(run.checkpoints, f"step-{step:08d}"))
    if status:
        write_state(run.attempt(attempt), status, step=step, epoch=0, reason="as told", asked={"epochs": 2})
    release_run(run, attempt)
    return run


@pytest.mark.parametrize(
    ("status", "saved", "kind", "line"),
    [
        ("unfinished", True, "resumes", "resumes from step 4"),
        ("failed", True, "resumes", "resumes from step 4"),
        ("", True, "resumes", "resumes from step 4"),
        ("", False, "begins again", "begins again, without a checkpoint"),
        ("failed", False, "begins again", "begins again, without a checkpoint"),
        ("finished", True, "finished", "; no step is left of the 2 epochs asked for; to begin anew: --fresh"),
        ("finished", False, "begins again", "begins again, without a checkpoint"),
    ],
)
def test_a_start_does_what_is_left(folder: str, status: str, saved: bool, kind: str, line: str) -> None:
    request = RunRequest(folder, COMMAND)
    assert inspect_run(request).kind == begin(request).kind == "new"
    leave(folder, status, 4, saved=saved)
    seen = inspect_run(request)
    assert (seen.kind, seen.step) == (kind, 4 if saved else 0)
    assert str(seen).endswith(line)
    again = begin(request, "local-2")
    assert (again.kind, again.run.path, again.attempt) == (kind, folder, "local-2")


def test_fresh_sets_no_folder_aside_that_hpcddp_did_not_begin(folder: str) -> None:
    for name in ("checkpoints/step-00000004", "attempts/1"):
        os.makedirs(os.path.join(folder, name))
    with pytest.raises(RequestError, match=r"--fresh would set .*train aside, and hpcddp has begun no run in it: "):
        begin(RunRequest(folder, COMMAND, fresh="1"))
    assert set_run_aside(RunRequest(folder, COMMAND, fresh="1"), {}) is None
    assert os.listdir(os.path.dirname(folder)) == ["train"]


@pytest.mark.parametrize("run_dir", [".", ".."])
def test_fresh_does_not_set_the_folder_aside_that_the_job_works_in(
    folder: str, monkeypatch: pytest.MonkeyPatch, run_dir: str
) -> None:
    begin(RunRequest(folder, COMMAND))
    leave(folder, "unfinished", 4)
    os.makedirs(os.path.join(folder, "src"))
    monkeypatch.chdir(os.path.join(folder, "src") if run_dir == ".." else folder)
    with pytest.raises(RequestError, match=r"aside, and the job works in that folder\nhint: .*--name"):
        begin(RunRequest(os.path.join(os.getcwd(), run_dir), COMMAND, fresh="1"), "local-2")


def test_fresh_acts_once(folder: str) -> None:
    begin(RunRequest(folder, COMMAND))
    leave(folder, "unfinished", 4)
    request = RunRequest(folder, COMMAND, fresh="20261126T0255-1a2b")
    seen = inspect_run(request)
    assert (seen.kind, seen.old) == ("set aside", RunFolder(f"{folder}.old1"))
    assert str(seen).endswith("train: new, as --fresh asks; the old one is " + f"{folder}.old1")
    assert begin(request, "local-2").old == RunFolder(f"{folder}.old1")
    assert read_about(RunFolder(folder)).fresh == request.fresh
    leave(folder, "unfinished", 2, attempt="local-2")
    assert begin(request, "local-3").kind == "resumes"  # a requeue, a chain's next job, a restart
    leave(folder, "unfinished", 3, attempt="local-3")
    assert begin(request._replace(fresh="another"), "local-4").old == RunFolder(f"{folder}.old2")
    assert sorted(os.listdir(os.path.dirname(folder))) == ["train", "train.old1", "train.old2"]


def test_what_was_set_aside_is_as_it_was(folder: str) -> None:
    begin(RunRequest(folder, COMMAND))
    leave(folder, "finished", 4)
    old = begin(RunRequest(folder, COMMAND, fresh="1"), "local-2").old
    assert old is not None
    assert [one.holder.attempt for one in read_holds(old)] == ["local-1"]
    assert [one.holder.attempt for one in read_holds(RunFolder(folder))] == ["local-2"]


def test_a_folder_that_is_held_is_never_set_aside(folder: str, another: int) -> None:
    begin(RunRequest(folder, COMMAND), process=another)
    for act in (lambda one: begin(one, "local-2"), lambda one: set_run_aside(one, {})):
        with pytest.raises(HeldError, match=f"process {another}"):
            act(RunRequest(folder, COMMAND, fresh="1"))
    assert os.listdir(os.path.dirname(folder)) == ["train"]


def test_what_submit_sets_aside_its_job_does_not(folder: str) -> None:
    request = RunRequest(folder, COMMAND, fresh="1")
    assert set_run_aside(request, {}) is None
    begin(RunRequest(folder, COMMAND))
    leave(folder, "unfinished", 4)
    assert set_run_aside(request, {}) == RunFolder(f"{folder}.old1")
    assert set_run_aside(request, {}) is None
    seen = begin(request, "local-2")
    assert (seen.kind, seen.old) == ("new", None)


def test_one_attempt_at_a_time_holds_a_run(folder: str, another: int) -> None:
    begin(RunRequest(folder, COMMAND), process=another)
    with pytest.raises(HeldError, match="in use by attempt local-1"):
        begin(RunRequest(folder, COMMAND), "local-2")


def test_each_index_of_an_array_is_a_run(folder: str) -> None:
    env = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "7"}
    assert start_run(RunRequest(folder), "11_7", env, process=os.getpid(), numbered=True).run == RunFolder(
        f"{folder}.7"
    )


def test_resume_names_a_run_that_is_there(folder: str) -> None:
    with pytest.raises(RequestError, match="there is no such run"):
        begin(RunRequest(folder, COMMAND, takes_words=True))
    begin(RunRequest(folder, COMMAND))
    leave(folder, "unfinished", 4)
    assert begin(RunRequest(folder, ("other",), takes_words=True), "local-2").kind == "resumes"
    with pytest.raises(RequestError, match="--fresh begins a new run"):
        begin(RunRequest(folder, COMMAND, fresh="1", takes_words=True))


def test_a_new_run_names_an_unfinished_one_of_the_same_script_beside_it(folder: str) -> None:
    begin(RunRequest(f"{folder}-lr0.1", (*COMMAND, "--lr", "0.1")))
    leave(f"{folder}-lr0.1", "unfinished", 4)
    begin(RunRequest(f"{folder}-other", ("python", "other.py")))
    leave(f"{folder}-other", "unfinished", 4)
    for seen in (inspect_run(RunRequest(folder, COMMAND)), begin(RunRequest(folder, COMMAND))):
        assert f"train-lr0.1 is unfinished; to resume it: --resume {folder}-lr0.1" in str(seen)
    assert inspect_run(RunRequest(folder, COMMAND)).unfinished is None


def start_at_once(folders: list[str], fresh: str = "") -> list[str]:
    """What each of these starts says, one process each, which all live until the last one has answered."""
    go, came, over = os.pipe(), os.pipe(), os.pipe()
    children = []
    for number, folder in enumerate(folders):
        pid = os.fork()
        if pid == 0:
            os.read(go[0], 1)
            try:
                answer = begin(RunRequest(folder, ("python", "train.py", str(number)), fresh), f"local-{number}").kind
            except HeldError:
                answer = "held"
            except BaseException as error:
                answer = repr(error)
            os.write(came[1], f"{answer}\n".encode())
            os.read(over[0], 1)
            os._exit(0)
        children.append(pid)
    os.write(go[1], b"." * len(folders))
    told = b""
    while told.count(b"\n") < len(folders):
        told += os.read(came[0], 4096)
    os.write(over[1], b"." * len(folders))
    for child in children:
        os.waitpid(child, 0)
    for end in (*go, *came, *over):
        os.close(end)
    return told.decode().split("\n")[:-1]


TIMES = [3, pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", TIMES)
def test_six_commands_at_once_get_their_folder_each(tmp_path: Path, times: int) -> None:
    for nth in range(times):
        folders = [str(tmp_path / f"{nth}/train-lr0.{number}") for number in range(6)]
        assert start_at_once(folders) == ["new"] * 6
        assert sorted(os.listdir(tmp_path / str(nth))) == sorted(map(os.path.basename, folders))


@pytest.mark.parametrize("times", TIMES)
def test_of_one_command_that_is_started_six_times_at_once_one_holds_the_run(tmp_path: Path, times: int) -> None:
    for nth in range(times):
        told = start_at_once([str(tmp_path / f"{nth}/train")] * 6)
        assert told.count("held") == 5, told
        assert os.listdir(tmp_path / str(nth)) == ["train"]


@pytest.mark.parametrize("times", TIMES)
def test_of_six_that_set_one_folder_aside_at_once_one_does(tmp_path: Path, times: int) -> None:
    for nth in range(times):
        folder = str(tmp_path / f"{nth}/train")
        begin(RunRequest(folder, COMMAND))
        leave(folder, "unfinished", 4)
        assert start_at_once([folder] * 6, fresh="1").count("held") == 5
        assert sorted(os.listdir(tmp_path / str(nth))) == ["train", "train.old1"]
