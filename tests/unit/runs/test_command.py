"""What makes two commands the same, and what a run without a name is called."""

from __future__ import annotations

import pytest

from hpcddp.runs.command import identify_command, name_command


@pytest.mark.parametrize(
    "words",
    [
        "python train.py --lr 1",
        "python3 ./train.py --lr 1",
        "/opt/env/bin/python3.12 -u train.py --lr 1",
        "python -W ignore -X dev train.py --lr 1",
    ],
)
def test_the_interpreter_its_path_and_its_options_are_no_part_of_a_command(words: str) -> None:
    assert identify_command(words.split()) == ("python", "train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py --lr 1", "python train.py --lr 2"),
        ("python train.py", "python evaluate.py"),
        ("python -m proj.train", "python -m proj.evaluate"),
        ("python -m train", "python train"),
        ("python a/train.py", "python b/train.py"),
        ("./train.sh", "bash ./train.sh"),
    ],
)
def test_another_script_and_other_arguments_are_another_command(one: str, other: str) -> None:
    assert identify_command(one.split()) != identify_command(other.split())


def test_a_program_is_known_by_its_name_and_nothing_is_no_command() -> None:
    assert identify_command(["/apps/bin/solve", "-u"]) == identify_command(["solve", "-u"]) == ("solve", "-u")
    assert identify_command([]) == ()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("python train.py", "train"),
        ("python src/train.py --lr 1", "train"),
        ("bash run.sh", "run"),
        ("python -m proj.train", "proj.train"),
        ("python -u -m proj.evaluate data.py", "proj.evaluate"),
        ("/apps/bin/solve", "solve"),
        ("python", "python"),
    ],
)
def test_a_run_is_called_after_its_module_or_script(words: str, name: str) -> None:
    assert name_command(words.split()) == name
