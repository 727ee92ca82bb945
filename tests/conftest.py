"""Running real programs from tests: in a clean environment, never longer than said, leaving nobody behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]

# `make test-all` draws ten times as many examples for every property that does not set its own number.
settings.register_profile("long", max_examples=1000, deadline=None)

# What a program may inherit from whoever runs the tests: nothing that a launcher or a scheduler set.
_INHERITED = ("HOME", "LANG", "TMPDIR", "USER", "SSL_CERT_FILE", "PIP_")


def marked(mark: str) -> dict[int, str]:
    """Process id and command line of every process whose environment holds `mark`.

    A process group is not enough: Open MPI gives each rank a group of its own, and a killed mpirun leaves them behind.
    Two looks, since a process in the middle of an exec shows an empty environment.
    """
    found = {}
    for folder in [*Path("/proc").glob("[0-9]*"), *Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def kill_marked(mark: str, grace_s: float = 0) -> list[str]:
    """SIGKILL what is still there after `grace_s`: an mpirun may end while a rank that it killed is still ending."""
    end = time.monotonic() + grace_s
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def run_command(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    timeout_s: float = 90,
) -> subprocess.CompletedProcess[str]:
    """Run to the end and return status, stdout and stderr; fails the test after `timeout_s`, or if it leaves processes.

    The environment is a clean one with the tests' Python first on PATH; `env` is added to it.
    """
    mark = f"HPCDDP_TEST_MARK={uuid.uuid4()}"
    clean = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
    clean["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    name, value = mark.split("=")
    process = subprocess.Popen(
        [str(word) for word in argv],
        env=clean | dict(env or {}) | {name: value},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_marked(mark)
        out, err = process.communicate()
        pytest.fail(f"{argv} ran for more than {timeout_s} s\n--- stdout\n{out}\n--- stderr\n{err}")
    finally:
        left = kill_marked(mark, grace_s=5)
    assert not left, f"{argv} left these processes: {left}"
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@pytest.fixture(scope="session")
def run() -> Run:
    return run_command


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO
