"""The process that stays beside a rank's program."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S

BESIDE = """
import os, sys
from hpcddp.cli import beside
stderr = beside.Stderr(os.dup(2))
program = beside.start_program(sys.argv[1:], dict(os.environ), stderr.entry)
stderr.start()
status = beside.wait_for(program)
stderr.finish()
beside.end_alike(status)
"""
WARNING = "[W1 b.cpp:2] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
ECHO = f"import sys; sys.stderr.write('[W1 a.cpp:1] kept\\n{WARNING}\\nlast, without an end')"
WAITING = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
signal.pause()
"""


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BESIDE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -TERM $$", -15), ("kill -ABRT $$", -6)],
)
def test_it_ends_as_the_program_ended(line: str, status: int) -> None:
    process = start("sh", "-c", line)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status


def test_a_signal_to_it_goes_on_to_the_program() -> None:
    process = start(sys.executable, "-c", WAITING)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7


def watches_its_end(process: int) -> bool:
    """Whether the kernel is to signal the program when this process's pipe is closed: O_ASYNC, by one of its files."""
    for path in Path(f"/proc/{process}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if int(path.read_text().partition("flags:")[2].split()[0], 8) & os.O_ASYNC:
                return True
    return False


def test_the_program_does_not_outlive_it() -> None:
    process = start(sys.executable, "-c", WAITING)
    assert process.stdout is not None
    program = int(process.stdout.readline())
    waiter = os.pidfd_open(program)
    end = time.monotonic() + PATIENCE_S
    while not watches_its_end(process.pid):  # on a busy machine the program may be first
        assert time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    ended, _, _ = select.select([waiter], [], [], PATIENCE_S)
    os.close(waiter)
    process.communicate(timeout=PATIENCE_S)
    assert ended


def test_stderr_passes_without_the_warning_and_whole() -> None:
    process = start(sys.executable, "-c", ECHO)
    _, text = process.communicate(timeout=PATIENCE_S)
    assert text == "[W1 a.cpp:1] kept\nlast, without an end"


def test_signals_are_as_they_were_for_the_program() -> None:
    look = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD).name)"
    process = start(sys.executable, "-c", look)
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert text == "set() SIG_DFL\n"
