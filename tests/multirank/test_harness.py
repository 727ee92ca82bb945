"""The tests' own way of running programs: nothing that was started stays behind."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.multirank


def is_running(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if word.encode() in path.read_bytes():
                return True
    return False


@pytest.fixture
def seconds() -> str:
    """How long to sleep: a time that no other process sleeps, such as this test's with another launcher."""
    return f"7654.{uuid.uuid4().int % 10**12:012}"


def test_a_launch_that_hangs_fails_the_test_and_is_ended_with_all_its_ranks(flavour, run, tmp_path, seconds):
    rank = ["sh", "-c", f'touch "$0/$$"; exec sleep {seconds}', tmp_path]
    with pytest.raises(pytest.fail.Exception, match="did not end"):
        run([*flavour.mpirun(2), *rank], env=flavour.env, hangs=lambda: len(list(tmp_path.iterdir())) == 2)
    assert not is_running(seconds)


def test_a_process_that_is_left_behind_fails_the_test(run, seconds):
    leave = f"setsid sleep {seconds} > /dev/null 2>&1 & until grep -q {seconds} /proc/$!/cmdline; do :; done"
    with pytest.raises(AssertionError, match="left these processes"):
        run(["bash", "-c", leave], grace_s=0)
    assert not is_running(seconds)
