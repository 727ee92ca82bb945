"""Ranks that wait for each other at different lines cannot meet any more: the job ends, and names who is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.guard.hpcddp_stand import NO_WAIT, WAITS
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.hang import Stand, find_hang
from hpcddp.runs.state import read_state

RunRanks = Callable[..., Any]
SUM = Stand("train.py:9, in main: rt.sum(1)", "all_reduce", 61.0, WAITS)
SLEEP = Stand("train.py:7, in main: time.sleep(1000)", "", 61.0, NO_WAIT)
LOOP = SLEEP._replace(seconds=0.0, quiet_s=61.0)
RING = Stand("train.py:5, in main: dist.recv(x, left)", "recv", 61.0, WAITS)
BARRIER = Stand("train.py:8, in main: dist.barrier()", "barrier", 61.0, WAITS)


@pytest.mark.parametrize(
    ("stands", "missing"),
    [
        ([SUM, SLEEP, SUM], [1]),  # the rank that does not wait
        ([SUM, BARRIER, SUM], [1]),  # all wait: the fewer ones
        ([SLEEP, SUM, SLEEP], [0, 2]),
        ([SUM, SUM, SUM], None),  # one slow collective
        ([SUM, SLEEP._replace(seconds=0.0), SUM], None),  # it gets on
        ([SUM, SLEEP], None),  # one gives no answer
        ([SUM, LOOP, SUM], [1]),  # it computes, and reads and writes nothing
        ([RING, RING, RING], [0, 1, 2]),  # nobody sends
        ([RING, BARRIER, BARRIER], [0]),
    ],
)
def test_a_hang_is_all_ranks_at_different_lines_or_in_messages_and_none_gets_on(
    stands: list[Stand], missing: list[int] | None
) -> None:
    hang = find_hang(dict(enumerate(stands)), 3, 60.0)
    assert (hang and hang.ranks) == missing


@pytest.mark.parametrize(
    ("calls", "missing"),
    [
        ((9, 8, 9), [1]),  # behind the others, at the same line
        ((9, 9, 9), None),  # a slow collective
        ((9, 0, 9), None),  # not known of all
    ],
)
def test_of_ranks_at_one_line_those_with_fewer_collectives_are_missing(
    calls: tuple[int, ...], missing: list[int] | None
) -> None:
    hang = find_hang({rank: SUM._replace(collectives=n) for rank, n in enumerate(calls)}, 3, 60.0)
    assert (hang and hang.ranks) == missing
    assert hang is None or f"rank 1, after 8 collectives, at {SUM}. The others: ranks 0, 2, after 9" in hang.message


def test_a_hang_ends_the_job_with_the_missing_ranks_line_on_every_kind_of_group(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    env = {"HPCDDP_WATCHDOG": "0.4", "HPCDDP_WATCHDOG_END": "1"}
    for body in ("never_come_to_a_sum", "never_come_to_a_barrier"):
        outcome = run_ranks(f"watchdog_bodies:{body}", 2, str(tmp_path / body), env=env)
        assert outcome.statuses == [6, 1], outcome.outputs
        for output in outcome.outputs:
            line = next(line for line in output.splitlines() if "have waited for each other" in line)
            says = r"for 1 s, at different lines: rank 1(, after \d+ collectives?,)? at watchdog_bodies\.py:"
            assert re.search(says, line), line
            assert ": held.wait()" in line.partition(". The others: rank 0")[0]
            assert "HPCDDP_WATCHDOG_END=3600 waits longer" in output
    outcome = run_ranks("watchdog_bodies:loop_without_end", 2, "", env=env)
    assert outcome.statuses == [6, 1], outcome.outputs
    assert re.search(r"rank 1(, after \d+ collectives?,)? at watchdog_bodies\.py:\d+, in loop_", outcome.outputs[1])
    state = read_state(RunFolder(str(tmp_path / "never_come_to_a_sum")))
    assert state is not None
    assert state.status == "failed"
    assert re.search(r"rank 1(, after \d+ collectives?,)? at watchdog_bodies\.py", state.reason), state.reason
