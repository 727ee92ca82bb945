"""A rank's sign of life, of a real process whose main thread does one thing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.guard.hpcddp_stand import NO_WAIT, WAITS
from hpcddp.runs.heartbeat import HEARTBEAT_VARIABLE, Page, make_page
from tests.conftest import PATIENCE_S

BEATS = """
import hashlib, os, time
from hpcddp.training.activity import at_files, waiting; from hpcddp.training.watchdog import beating
with beating(os.environ):
    {}
"""
CALL = 'hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)'  # in one line, for many minutes
SLEEP = "time.sleep(1000)"
FSYNC = "with at_files(): time.sleep(1000)"  # as a call does that waits for a disk
WORK = "while True: sum(range(1000)); len(str(time.time()))"


@pytest.fixture
def rank(start_python: Callable[..., Any], tmp_path: Path) -> Callable[[str], Page]:
    def start(line: str) -> Page:
        page = make_page()
        assert page is not None
        (tmp_path / "rank.py").write_text(BEATS.format(line))
        start_python(tmp_path, "rank.py", **{HEARTBEAT_VARIABLE: page.path})
        return page

    return start


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("line", [CALL, FSYNC])
def test_a_thread_that_stands_at_work_or_at_a_checkpoint_s_files_uses_its_time_and_does_not_move(
    rank: Callable[[str], Page], line: str
):
    page = rank(line)
    wait_until(lambda: page.read_place().line)
    assert "rank.py:5" in page.read_place().line
    before = page.read()
    wait_until(lambda: page.read().uses > before.uses)
    assert page.read().moves == before.moves


@pytest.mark.parametrize(("line", "waits"), [(SLEEP, NO_WAIT), (f"with waiting(): {SLEEP}", WAITS)])
def test_a_thread_that_stands_and_uses_nothing_says_neither_and_whether_it_waits_for_other_ranks(
    rank: Callable[[str], Page], line: str, waits: int
):
    page = rank(line)
    wait_until(lambda: page.read_place().line)
    assert page.read_place().waits == waits
    before = page.read()
    wait_until(lambda: page.read().looks > before.looks + 1)
    assert (page.read().moves, page.read().uses) == (before.moves, before.uses)


def test_a_thread_whose_lines_change_moves(rank: Callable[[str], Page]):
    page = rank(WORK)
    wait_until(lambda: page.read().moves > 1)


def test_a_rank_ends_itself_where_the_process_beside_it_is_stopped(
    start_python: Callable[..., Any], tmp_path: Path
) -> None:
    page = make_page()
    assert page is not None
    (tmp_path / "rank.py").write_text(BEATS.format(SLEEP))
    rank = start_python(tmp_path, "rank.py", **{HEARTBEAT_VARIABLE: page.path})
    page.write_lease(time.monotonic() + 1000)
    wait_until(lambda: page.read().looks)
    page.write_lease(time.monotonic() - 1)
    assert rank.wait() == -signal.SIGKILL
