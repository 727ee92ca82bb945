"""What the supervisor makes of signals, and of its launcher's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.supervisor.program import Output, ended_by
from tests.conftest import wait_until


@pytest.mark.parametrize(
    ("name", "ago_s", "is_so"),
    [
        ("", 0, False),
        ("SIGUSR1", 5, True),  # the ranks save
        ("SIGUSR1", 3600, False),  # they went on
        ("SIGHUP", 3600, False),
        ("SIGTERM", 3600, True),  # somebody wants the job's end
        ("SIGINT", 3600, True),
    ],
)
def test_a_signal_after_which_the_ranks_went_on_is_not_why_they_were_lost(name: str, ago_s: float, is_so: bool):
    assert ended_by(name, ago_s) == is_so


_READS = """
import os, signal, time
from hpcddp.signals import name_signal
from hpcddp.supervisor.program import Signals
signals = Signals()
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGHUP)
for number in (signal.SIGALRM, signal.SIGQUIT, signal.SIGRTMIN + 3, signal.SIGUSR1):
    os.kill(os.getpid(), number)
came = []
while signal.SIGUSR1 not in came:
    came += signals.read()
print(*sorted(map(name_signal, came)))
"""


@pytest.mark.parametrize("ignored", ["", "HUP INT USR1"])
def test_a_hangup_that_is_ignored_at_the_start_stays_ignored(ignored: str):
    shell = f'trap - HUP INT USR1; {f"trap {chr(39) * 2} {ignored}; " if ignored else ""}exec "$@"'
    words = ["env", "--default-signal=HUP,INT,USR1", "sh", "-c", shell, "sh", sys.executable, "-c", _READS]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    hangup = [] if "HUP" in ignored else ["SIGHUP"]
    assert done.stdout.split() == sorted([*hangup, "SIGINT", "SIGALRM", "SIGQUIT", "SIGRTMIN+3", "SIGUSR1"])


def test_the_log_of_a_launcher_that_has_ended_is_complete_and_no_longer_open(tmp_path: Path):
    log, (reads, writes) = tmp_path / "launcher.log", os.pipe()
    Output().copy(reads, str(log))
    os.write(writes, b"step 1\n")
    os.close(writes)
    assert wait_until(lambda: str(log) not in map(os.path.realpath, Path("/proc/self/fd").iterdir()))
    assert log.read_text() == "step 1\n"
