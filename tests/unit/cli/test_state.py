"""`hpcddp state`: what it says to the job scripts of hpcddp 0.1 by its status; people ask `hpcddp status`."""

from __future__ import annotations

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.holder import Holder
from hpcddp.runs.lock import release_run, take_run
from hpcddp.runs.state import note_checkpoint, write_state


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run whose attempt 41 stopped in time; this is attempt 41."""
    write_state(RunFolder(str(tmp_path)).attempt("41"), "unfinished", step=210, epoch=3, reason="deadline")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "41")
    return tmp_path


def test_a_script_is_told_by_the_status_whether_its_attempt_is_unfinished(stopped, capsys, monkeypatch):
    assert main(["state", "--unfinished"]) == 0
    assert capsys.readouterr() == ("", "hpcddp: unfinished: step 210 (deadline)\n")
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42")
    assert main(["state", "--unfinished"]) == 1
    for status in ("finished", "failed"):
        write_state(RunFolder(str(stopped)).attempt("42"), status, step=220, epoch=3, reason="")
        assert main(["state", "--unfinished"]) == 1


def test_a_run_without_a_state_is_not_unfinished(stopped, capsys):
    (stopped / "state.json").unlink()
    assert main(["state", "--unfinished"]) == 1
    assert main(["state"]) == 2
    assert f"hpcddp state is hpcddp status now\nhint: hpcddp status {stopped}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", '{"status": "unfinished"', "\0", '{"status": "unfinished", "step": "x"}']
)
@pytest.mark.parametrize("options", [["--unfinished"], ["--chain", "5"]])
def test_a_damaged_state_is_told_in_two_lines_and_stays_as_it_is(stopped, content, options, capsys):
    path = stopped / "state.json"
    path.write_text(content)
    assert main(["state", *options]) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert (said.out, first.startswith(f"hpcddp: {path} ")) == ("", True)
    assert second.startswith(f"hint: look at it: head {path}; then restore it, or remove it")
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "unset", "status"),
    [
        (["state"], "HPCDDP_RUN_DIR", 2),
        (["state", "--chain", "3"], "HPCDDP_ATTEMPT", 4),
        (["state", "--chain", "x"], "-", 2),
        (["state", "--chain", "3", "--unfinished"], "-", 2),
        (["state", "--", "python"], "-", 2),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(stopped, arguments, unset, status, monkeypatch):
    monkeypatch.delenv(unset, raising=False)
    assert main(arguments) == status


def test_of_an_attempt_that_was_killed_the_checkpoint_that_is_resumed_is_told(tmp_path, capsys):
    run = RunFolder(str(tmp_path / "train"))
    take_run(run, Holder("41", "elsewhere", "", 1, "", command=("python", "train.py")), lambda _scheduler, _job: None)
    note_checkpoint(run.attempt("41"), step=30, epoch=3)
    (tmp_path / "train/checkpoints/step-00000032").mkdir(parents=True)
    (tmp_path / "train/checkpoints/step-00000032/manifest.json").write_text('{"epoch": 4}')
    release_run(run, "41")
    assert main(["status", run.path]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{run.path}: unfinished\n")
    assert "step      32, epoch 4\n" in told
    assert "why       checkpoint at step 32; the attempt has ended since\n" in told
