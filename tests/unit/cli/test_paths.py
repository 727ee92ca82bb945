"""Every verb, also of those that come later: a path that the system refuses is answered in two lines."""

from __future__ import annotations

import os
import shlex

import pytest

from hpcddp.cli.main import VERBS, main

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
    "help": [],
}
BAD = {"loop": "loop", "below-a-file": "file/x.yaml", "long": f"{'n' * 300}.yaml", "proc": "/proc/x.yaml",
       "folder": "folder"}  # fmt: skip
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


@pytest.mark.parametrize("line", ["render --site abci3 --account gabc12345 -- true", "render --site local --demo",
                                  "launch --here --dry-run -- true"])  # fmt: skip
def test_a_folder_that_was_deleted_is_said(line, answered, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert answered(line) == ("the folder that this shell is in has been deleted", "cd ~")


@pytest.mark.parametrize("verb", ["sites", "completion bash", "render -- true"])
@pytest.mark.parametrize("loop", ["config/hpcddp", "config/hpcddp/sites"])
def test_an_own_folder_that_cannot_be_read_is_said(verb, loop, answered, tmp_path):
    (tmp_path / loop).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / loop).symlink_to(tmp_path / loop)
    message, _ = answered(verb)
    assert str(tmp_path / "config/hpcddp") in message


def test_a_new_site_makes_no_folder_that_was_misspelt(answered, tmp_path):
    message, hint = answered(f"sites new mine --file {tmp_path}/no/dir/mine.yaml")
    assert (message, hint) == (f"the folder {tmp_path}/no/dir of --file does not exist", f"mkdir -p {tmp_path}/no/dir")
    assert not (tmp_path / "no").exists()


def test_a_new_site_whose_file_cannot_be_written_is_answered_with_another_file(answered):
    message, hint = answered("sites new mine --file /proc/mine.yaml")
    assert message == "/proc/mine.yaml cannot be written: no such file or directory"
    assert hint == "hpcddp sites new NAME --file ANOTHER.yaml"
