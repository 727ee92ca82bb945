"""The paths of a run folder, and which attempt a process belongs to."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.folder import (
    RunFolder,
    cannot_write,
    choose_attempt,
    find_attempt,
    list_checkpoints,
    name_checkpoint,
)
from hpcddp.runs.jsonfile import DamagedFileError
from hpcddp.runs.state import RunState, read_state, write_state


def test_only_finished_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for name in (
        "step-00000010",
        "step-99999999",
        "step-00000009",
        "step-100000000",
        "step-00000011.tmp-7",
        "step-00000008.old-7",
        "x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").touch()
    listed = [os.path.basename(path) for path in list_checkpoints(str(tmp_path))]
    assert listed == ["step-00000009", "step-00000010", "step-99999999", "step-100000000"]
    assert name_checkpoint(str(tmp_path), 9) == str(tmp_path / "step-00000009")
    assert list_checkpoints(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("name", ["../../../y", ".."])
def test_an_attempt_does_not_lead_out_of_the_run_folder(name: str, tmp_path: Path) -> None:
    env = {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": name}
    with pytest.raises(LaunchError, match="no name of a folder"):
        find_attempt(env)


def test_the_attempt_is_the_job_scripts_or_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_attempt({"HPCDDP_RUN_DIR": "runs/x"}) is choose_attempt({"HPCDDP_ATTEMPT": "41"}) is None
    env = {"HPCDDP_RUN_DIR": "runs/x", "HPCDDP_ATTEMPT": "41"}
    assert find_attempt(env) == choose_attempt(env) == RunFolder(str(tmp_path / "runs/x")).attempt("41")
    assert choose_attempt(env, "/else").run.path == "/else"
    assert choose_attempt({}, "/else").name.startswith("local-")


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert read_state(run) is None
    write_state(run.attempt("41"), "unfinished", step=3, epoch=1, reason="deadline", exact={"method": "tree"})
    state = read_state(run)
    assert state is not None
    assert state._replace(written_at="") == RunState("unfinished", 3, 1, "deadline", "41", None, {"method": "tree"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("status", "what"), ("step", None)],
)
def test_a_state_with_a_wrong_value_is_never_guessed_at(tmp_path: Path, name: str, value: object) -> None:
    run = RunFolder(str(tmp_path))
    write_state(run.attempt("41"), "unfinished", step=3, epoch=1, reason="deadline")
    content = json.loads(Path(run.state).read_text())
    Path(run.state).write_text(json.dumps(content | {name: value}))
    told = rf"not hold what hpcddp writes: its {name} is {re.escape(repr(value))}\nhint: look at it: head "
    with pytest.raises(DamagedFileError, match=told):
        read_state(run)


def test_a_folder_that_cannot_be_listed_is_told_in_two_lines(tmp_path: Path) -> None:
    path = str(tmp_path / "loop")
    os.symlink(path, path)
    with pytest.raises(RequestError) as error:
        list_checkpoints(path)
    assert str(error.value) == f"{path} cannot be read: too many levels of symbolic links\nhint: ls -ld {path}"


def test_a_run_folder_that_cannot_be_written_has_a_hint_that_can_be_followed() -> None:
    told = cannot_write(RunFolder("runs/x"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert told.message == "the run folder runs/x cannot be written: no space left on device"
    assert "make room there, or" in told.hint
