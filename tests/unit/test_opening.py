"""A process that a `with` body has forked off ends nothing of what the body's own process opened."""

from __future__ import annotations

import subprocess
import sys

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
