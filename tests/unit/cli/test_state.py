"""`hpcddp state`: what it says to people, and to scripts by its status."""

from __future__ import annotations

import pytest

from hpcddp.cli.main import main
from hpcddp.training.keeping.runfolder import RunFolder, write_state


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run whose attempt 41 stopped in time; this is attempt 41."""
    write_state(RunFolder(tmp_path, "41"), "continue", step=210, epoch=3, reason="deadline")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "41")
    return tmp_path


def test_people_are_told_in_one_line(stopped, capsys):
    assert main(["state", str(stopped)]) == 0
    assert capsys.readouterr().out == "continue at step 210 (deadline), attempt 41\n"


def test_a_script_is_told_by_the_status_whether_its_attempt_is_to_be_continued(stopped, capsys, monkeypatch):
    assert main(["state", "--continues"]) == 0
    assert capsys.readouterr() == ("", "hpcddp: to be continued: step 210 (deadline)\n")
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42")
    assert main(["state", "--continues"]) == 1
    for status in ("finished", "failed"):
        write_state(RunFolder(stopped, "42"), status, step=220, epoch=3, reason="")
        assert main(["state", "--continues"]) == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"status": "continue"', "\0"])
def test_what_is_no_state_says_nothing(stopped, content, capsys):
    (stopped / "state.json").unlink()
    if content is not None:
        (stopped / "state.json").write_text(content)
    assert main(["state", "--continues"]) == 1
    assert main(["state"]) == 2
    assert "has no state.json that can be read\nhint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "unset", "status"),
    [
        (["state"], "HPCDDP_RUN_DIR", 2),
        (["state", "--chain", "3"], "HPCDDP_ATTEMPT", 4),
        (["state", "--chain", "x"], "-", 2),
        (["state", "--chain", "3", "--continues"], "-", 2),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(stopped, arguments, unset, status, monkeypatch):
    monkeypatch.delenv(unset, raising=False)
    assert main(arguments) == status
