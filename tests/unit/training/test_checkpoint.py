"""A checkpoint is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import HeldError, check_not_taken, describe_process, take_run
from hpcddp.training.checkpoint import files, resume
from hpcddp.training.checkpoint.checkpointer import CheckpointWriter
from hpcddp.training.checkpoint.files import (
    STATE,
    begin_checkpoint,
    commit,
    find_fault,
    list_checkpoint_folders,
    read_checkpoint,
    write_state_file,
)
from hpcddp.training.checkpoint.resume import choose_newest
from hpcddp.training.checkpoint.tracked import Tracked
from hpcddp.training.rendezvous.group import Group, Member

ALONE = Group(0, 1, "none", "gloo", torch.device("cpu"), (Member(0, "here", 1, 0, "0", ()),), HashStore())


class Numbers:
    """An object of a run, whose state tells the step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"weights": torch.full((1000,), float(self.step))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["weights"][0])


def _write(folder: Path, step: int, *, numbers: int | None = None, keep: int = 10) -> Path:
    """A checkpoint as a run of one rank writes it."""
    tracked = Tracked({"numbers": Numbers(step if numbers is None else numbers)})
    CheckpointWriter(ALONE, folder, keep).save(tracked, {"step": step, "seed": 3}, {})
    return folder / f"step-{step:08d}"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = _write(tmp_path, 1200)
    assert list_checkpoint_folders(tmp_path) == [path]
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.pt"]
    assert torch.equal(read_checkpoint(path)["numbers"]["weights"], torch.full((1000,), 1200.0))
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["seed"]) == (1200, 3)


def test_an_attempt_that_loses_its_run_while_it_writes_publishes_nothing(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    mine, other = (describe_process(name, os.getpid(), {}, ()) for name in ("7.1", "7.2"))
    take_run(run, mine, lambda _scheduler, _job: None)
    folder = Path(run.checkpoints)
    writer = CheckpointWriter(ALONE, folder, 2, lambda: check_not_taken(run, "7.1"))
    writer.save(Tracked({"numbers": Numbers(3)}), {"step": 3, "seed": 3}, {})
    take_run(run, other, lambda _scheduler, _job: None, "7.1")
    with pytest.raises(HeldError, match=r"from attempt 7\.1, which writes no more"):
        writer.save(Tracked({"numbers": Numbers(6)}), {"step": 6, "seed": 3}, {})
    assert [path.name for path in list_checkpoint_folders(folder)] == ["step-00000003"]


def _flip_a_bit(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "SHA-256": _flip_a_bit,
    "no complete manifest.json": lambda path: (path / "manifest.json").unlink(),
    "its files is []": lambda path: (path / "manifest.json").write_text('{"schema": 1, "files": []}'),
    "state.pt has 100 bytes": lambda path: os.truncate(path / "state.pt", 100),
    "state.pt: no such file": lambda path: (path / "state.pt").unlink(),
}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, *damaged = (_write(tmp_path, step) for step in range(1, 2 + len(DAMAGES)))
    for damage, path in zip(DAMAGES.values(), damaged, strict=True):
        damage(path)
    assert choose_newest(ALONE, tmp_path, "") == whole
    assert list_checkpoint_folders(tmp_path) == [whole], "the damaged ones are set aside"
    said = capsys.readouterr().err.splitlines()
    for line, path, words in zip(reversed(said), damaged, DAMAGES, strict=True):
        assert f"checkpoint {path} is damaged (" in line
        assert words in line


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_at_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [_write(tmp_path, step) for step in (1, 2)]
    for path in paths:
        os.truncate(path / "state.pt", 100)
    told = (
        rf"checkpoint {paths[1]} is damaged \(state.pt has 100 bytes, .*\), and 1 older one too: the run has no"
        r" other one to resume from\nhint: restore it from a copy, or begin a new run: --fresh"
    )
    for _ in range(2):  # the same command again is refused again
        with pytest.raises(RequestError, match=told):
            choose_newest(ALONE, tmp_path, "begin a new run: --fresh")
    assert list_checkpoint_folders(tmp_path) == paths
    assert capsys.readouterr().err == ""


class Disk:
    """Answers so many reads of a checkpoint's files with an error."""

    def __init__(self, failures: float, number: int) -> None:
        self._failures, self._number, self._hash_file = failures, number, files._hash_file

    def hash_file(self, path: Path) -> str:
        self._failures -= 1
        if self._failures >= 0:
            raise OSError(self._number, os.strerror(self._number), str(path))
        return self._hash_file(path)


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [_write(tmp_path, step) for step in (1, 2)]
    monkeypatch.setattr(resume, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(files, "_hash_file", Disk(2, errno.EIO).hash_file)
    assert choose_newest(ALONE, tmp_path, "") == paths[1]
    assert list_checkpoint_folders(tmp_path) == paths
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("is_file_away", "words"), [(True, "stale file handle"), (False, "manifest.json cannot be read: is a directory")]
)
def test_a_checkpoint_that_cannot_be_read_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file_away: bool, words: str
) -> None:
    paths = [_write(tmp_path, step) for step in (1, 2)]
    monkeypatch.setattr(resume, "PAUSES_S", (0.0, 0.0))
    if is_file_away:
        monkeypatch.setattr(files, "_hash_file", Disk(float("inf"), errno.ESTALE).hash_file)
    else:
        (paths[1] / "manifest.json").unlink()
        (paths[1] / "manifest.json").mkdir()  # root may read everything, and no folder
    told = f"rank 0 on here cannot read checkpoint {paths[1]}, which stays as it is: .*{words}"
    with pytest.raises(LaunchError, match=told):
        choose_newest(ALONE, tmp_path, "")
    assert list_checkpoint_folders(tmp_path) == paths


def test_a_rank_that_alone_cannot_read_a_checkpoint_ends_the_start_on_all(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    paths = [_write(tmp_path, step) for step in (1, 2)]
    outcome = run_ranks("checkpoint_bodies:choose_on_a_sick_host", 2, {"folder": str(tmp_path), "sick": 1})
    host = os.uname().nodename
    for output in outcome.outputs:
        assert f"LaunchError: rank 1 on {host} cannot read checkpoint {paths[1]}, which stays as it is: " in output
    assert list_checkpoint_folders(tmp_path) == paths


def test_the_folder_of_a_step_is_never_written_twice(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    before = (path / "state.pt").stat().st_ino
    _write(tmp_path, 1, numbers=2)
    assert (path / "state.pt").stat().st_ino == before


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        _write(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoint_folders(tmp_path)] == ["step-00000010", "step-00000015"]


def test_a_checkpoint_with_code_in_it_is_not_unpickled(tmp_path: Path) -> None:
    partial = begin_checkpoint(tmp_path, 1)
    assert partial is not None
    path = commit(partial, {STATE: write_state_file(partial, {"bad": print})}, {"step": 1})
    with pytest.raises(pickle.UnpicklingError):
        read_checkpoint(path)


def test_a_kill_at_any_operation_leaves_every_checkpoint_readable(
    tmp_path: Path, checkpoint_bodies: ModuleType
) -> None:
    """Three checkpoints are written again and again; each time the writer is killed one file operation later."""
    _write(tmp_path, 0)
    for kills in range(1000):
        first = 1 + max(int(path.name.removeprefix("step-")) for path in list_checkpoint_folders(tmp_path))
        pid = os.fork()
        if pid == 0:
            checkpoint_bodies.kill_at_operation(kills)
            for step in range(first, first + 3):
                _write(tmp_path, step, keep=2)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        checkpoints = list_checkpoint_folders(tmp_path)
        assert checkpoints
        assert [find_fault(path) for path in checkpoints] == [None] * len(checkpoints)
        if os.waitstatus_to_exitcode(status) == 0:  # there are no more operations
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert len(checkpoints) == 2
    assert kills > 30
