"""A process that a `with` body has forked off ends nothing of what the body's own process opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import os, sys
from contextlib import contextmanager
from hpcddp.uncaught import Opening

@contextmanager
def opened():
    try:
        yield
    finally:
        os.write(1, b"ended by the child\n" if child == 0 else b"ended by the parent\n")

child = -1
with Opening(opened()):
    child = os.fork()
    if child == 0 and sys.argv[1] == "exit":
        sys.exit(3)
    if child == 0 and sys.argv[1] == "error":
        raise ZeroDivisionError
if child == 0:
    os.write(1, b"the child goes on\n")
else:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_leaves_the_end_to_the_process_that_opened() -> None:
    for how, status in (("exit", 3), ("error", 1), ("on", 0)):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        went_on = ["the child goes on"] if how == "on" else []
        assert sorted(done.stdout.splitlines()) == sorted([str(status), "ended by the parent", *went_on])


MISTAKES = r"""
import sys
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
with Opening(opened()):
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
        ("explained", 2, "hpcddp: train.py:25: explained\nhint: mend it\n"),
        ("inside then outside", 2, "hpcddp: outside\nhint: mend it\n"),
        ("at the end", 2, "hpcddp: at the end\nhint: mend it\n"),
        ("inside, caught", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_mistake_in_the_body_ends_the_script_with_its_line(how: str, status: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISTAKES.lstrip())
    done = subprocess.run([sys.executable, "train.py", how], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = done.stderr if status == 2 else done.stderr.splitlines(keepends=True)[-1]
    assert (done.returncode, found) == (status, told), done.stderr
