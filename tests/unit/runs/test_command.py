"""What makes two commands the same, and what a run without a name is called."""

from __future__ import annotations

import pytest

from hpcddp.runs.command import identify_command, leave_out_start, name_command


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
    ("one", "other", "is_same"),
    [
        ("--out runs/4121.1", "--out runs/4121.2", True),
        ("--data /local/hpcddp-4121.1/x", "--data /local/hpcddp-4121.1/x", True),  # $HPCDDP_STAGED
        ("--out /tmp/tmp.fX2pQ9aLb1/data", "--out /tmp/tmp.kU7wE3zNc8/data", True),  # mktemp -d
        ("--config=/var/tmp/tmpab3_x9qk", "--config=/var/tmp/tmpz81hy__4", True),  # Python's tempfile
        ("--config /tmp/fold1.yaml", "--config /tmp/fold2.yaml", False),
        ("--config /tmp/tmp.fold1", "--config /tmp/tmp.fold2", False),
        ("--config conf/tmp/1.cfg", "--config conf/tmp/2.cfg", False),
        ("--config /home/me/tmp/tmp.fX2pQ9aLb1", "--config /home/me/tmp/tmp.kU7wE3zNc8", False),
        ("--fold 1", "--fold 2", False),
    ],
)
def test_what_each_start_has_otherwise_is_left_out_and_what_a_person_named_is_not(
    one: str, other: str, *, is_same: bool
) -> None:
    first, second = (
        leave_out_start(("fold.py", *words.split()), name, "4121")
        for words, name in ((one, "4121.1"), (other, "4121.2"))
    )
    assert (first == second) is is_same


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
