"""The tests' own way of running programs: nothing that was started stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.multirank


def is_running(word: str) -> bool:
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return any(word.encode() in line for line in lines)


def test_a_launch_that_hangs_fails_the_test_and_is_ended_with_all_its_ranks(flavour, run):
    with pytest.raises(pytest.fail.Exception, match="ran for more than 3 s"):
        run([*flavour.mpirun(2), "sleep", "7654.321"], env=flavour.env, timeout_s=3)
    assert not is_running("7654.321")


def test_a_process_that_is_left_behind_fails_the_test(run):
    with pytest.raises(AssertionError, match="left these processes"):
        run(["bash", "-c", "setsid sleep 7654.322 > /dev/null 2>&1 & sleep 0.2"])
    assert not is_running("7654.322")
