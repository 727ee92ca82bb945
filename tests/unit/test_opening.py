"""A mistake that a script does not catch ends it with two lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = r"""
import copy, sys
from contextlib import contextmanager
from hpcddp.errors import RequestError
from hpcddp.uncaught import Opening

@contextmanager
def opened():
    try:
        yield
    except RequestError:
        if how == "inside then outside":
            raise RequestError("outside", "mend it") from None
        raise
    except TypeError as error:
        raise RequestError("explained", "mend it") from error
    if how == "at the end":
        raise RequestError("at the end", "mend it")

def step():
    raise RequestError("inside", "mend it")

how = sys.argv[1]
opening = Opening(opened(), "opened(…)", "rt")
if how == "without with":
    assert not hasattr(opening, "__len__")
    copy.copy(opening).prepare()
with opening:
    if how == "explained":
        len(3)
    if how.startswith("inside"):
        try:
            step()
        except RequestError:
            if how == "inside, caught":
                1 / 0
            raise
"""


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("inside", 2, "hpcddp: train.py:20: inside\nhint: mend it\n"),
        ("explained", 2, "hpcddp: train.py:29: explained\nhint: mend it\n"),
        ("inside then outside", 2, "hpcddp: outside\nhint: mend it\n"),
        ("at the end", 2, "hpcddp: at the end\nhint: mend it\n"),
        ("without with", 2, "hpcddp: opened(…) is not open yet\nhint: with opened(…) as rt:\n"),
        ("inside, caught", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_mistake_in_the_body_ends_the_script_with_its_line(how: str, status: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISTAKES.lstrip())
    done = subprocess.run([sys.executable, "train.py", how], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = done.stderr if status == 2 else done.stderr.splitlines(keepends=True)[-1]
    assert (done.returncode, found) == (status, told), done.stderr
