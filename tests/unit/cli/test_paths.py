"""Every verb, also of those that come later: a path that the system refuses is answered in two lines."""

from __future__ import annotations

import os
import shlex

import pytest

from hpcddp.cli.main import main
from hpcddp.cli.verbs import VERBS

# verb -> what is typed, with PATH for the path. `launch` would become the launcher, so it only prints.
TYPED = {
    "render": ["PATH", "--site PATH -- true", "--site local --set venv=PATH -- true"],
    "layout": ["PATH", "--site PATH -- true"],
    "advise": ["PATH:make_model --gpu-memory 80GB", "--params 1e9 --layers 9 --hidden 9 --sequence 9 --site PATH"],
    "lint": ["PATH", "--site PATH x.sh"],
    "sites": ["show PATH", "new mine --file PATH"],
    "env": ["--from PATH"],
    "exec": [],  # it becomes a program, and its refusal ends the process
    "init": ["--site PATH -- true"],
    "launch": ["--here --dry-run --site PATH -- true"],
    "submit": ["PATH", "--site PATH -- true"],
    "status": ["PATH"],
    "logs": ["PATH"],
    "diagnose": ["PATH", "PATH x.out"],
    "stacks": ["PATH"],
    "efficiency": ["PATH"],
    "verify": [],  # its paths are those of a command
    "watch": ["PATH"],
    "cancel": ["PATH"],
    "check": ["--site PATH"],
    "supervise": [],  # job scripts write what it reads
    "train": [],  # its paths are those of a run and of data sets
    "compare": ["PATH runs/x", "PATH PATH"],
    "completion": [],
}
BAD = {"loop": "loop", "folder": "folder"}
LINES = [pytest.param(f"{verb} {line}", id=f"{verb} {line}") for verb in TYPED for line in TYPED[verb]]


def test_no_verb_is_left_out() -> None:
    assert set(TYPED) == set(VERBS)


@pytest.fixture
def answered(tmp_path, monkeypatch, capsys):
    """Types a line in a folder with such paths; fails unless it is refused in two lines. A fault of hpcddp raises."""
    for name in list(os.environ):
        if name.startswith(("HPCDDP_", "SLURM", "PBS", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HPCDDP_ATTEMPT", "a")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def answer(line: str) -> tuple[str, str]:
        status = main(shlex.split(line))
        *_, message, hint = capsys.readouterr().err.splitlines()
        assert status in {2, 3, 4}
        assert message.startswith("hpcddp: ")
        assert hint.startswith("hint: ")
        return message.removeprefix("hpcddp: "), hint.removeprefix("hint: ")

    return answer


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("line", LINES)
def test_a_path_that_the_system_refuses_is_answered_in_two_lines(line, bad, answered):
    answered(line.replace("PATH", bad))


def test_a_folder_that_was_deleted_is_said(answered, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert answered("render --site local --demo") == ("the folder that this shell is in has been deleted", "cd ~")


def test_a_new_site_whose_file_cannot_be_written_is_answered(answered):
    assert (
        answered("sites new mine --file /proc/mine.yaml")[0]
        == "/proc/mine.yaml cannot be used: no such file or directory"
    )
