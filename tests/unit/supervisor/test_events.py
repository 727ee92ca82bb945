"""Which of several events was the first cause, and how it is said."""

from __future__ import annotations

import pytest

from hpcddp.errors import PEER_FAILED
from hpcddp.supervisor.events import ERROR, GONE, KILLED, LEFT, SILENT, STUCK, Event, find_first_cause

_CLOSED = "RuntimeError: [pair.cc:561] Connection closed by peer [10.66.0.13]:30949"
_EXITED = {1: 1 << 8, PEER_FAILED: PEER_FAILED << 8}

CASES = {
    "a rank is killed, and the others see their connection close": (
        [
            Event(KILLED, 2, "n3", 1.0, status=9),
            Event(ERROR, 0, "n1", 1.2, status=_EXITED[1], text=_CLOSED),
            Event(ERROR, 1, "n2", 1.3, status=_EXITED[PEER_FAILED]),
        ],
        (KILLED, 2),
    ),
    "the failing rank still writes its traceback when another one ends": (
        [
            Event(ERROR, 0, "n1", 1.0, status=_EXITED[1], text=_CLOSED),
            Event(ERROR, 2, "n3", 4.0, status=_EXITED[1], text="ValueError: a"),
        ],
        (ERROR, 2),
    ),
    "a connection of the program's own, such as to a database, is no word on another rank": (
        [
            Event(ERROR, 2, "n3", 1.0, status=_EXITED[1], text="ConnectionRefusedError: [Errno 111] refused"),
            Event(ERROR, 0, "n1", 4.0, status=_EXITED[1], text="ValueError: a"),
        ],
        (ERROR, 2),
    ),
    "the launcher kills the others of a rank that failed": (
        [
            Event(ERROR, 2, "n3", 1.0, status=_EXITED[1], text="ValueError: a"),
            Event(KILLED, 0, "n1", 1.1, status=9),
        ],
        (ERROR, 2),
    ),
    "what the launcher kills is no cause of another one's error": (
        [
            Event(ERROR, 0, "n1", 1.0, status=_EXITED[1], text=_CLOSED),
            Event(KILLED, 1, "n2", 1.1, status=15),
        ],
        (ERROR, 0),
    ),
    "a host is silent for longer than the others needed to see it": (
        [
            Event(ERROR, 0, "n1", 9.0, status=_EXITED[1], text="RuntimeError: Timed out waiting 8000ms for recv"),
            Event(SILENT, 2, "n3", 1.0),
        ],
        (SILENT, 2),
    ),
    "a connection broke before the errors, and was waited for": (
        [
            Event(ERROR, 0, "n1", 1.2, status=_EXITED[1], text=_CLOSED),
            Event(GONE, 2, "n3", 1.0),
        ],
        (GONE, 2),
    ),
    "a rank left early": (
        [
            Event(ERROR, 0, "n1", 1.2, status=_EXITED[1], text=_CLOSED),
            Event(LEFT, 3, "n4", 1.0),
        ],
        (LEFT, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_cause_of_several_events(case: str):
    events, (kind, rank) = CASES[case]
    for order in (events, events[::-1]):
        cause = find_first_cause(order)
        assert cause is not None
        assert (cause.kind, cause.rank) == (kind, rank)


@pytest.mark.parametrize(
    ("event", "is_loss"),
    [
        (Event(KILLED, 2, "n3", status=9), True),
        (Event(GONE, 2, "n3"), True),
        (Event(SILENT, 2, "n3"), True),
        (Event(STUCK, 2, "n3", text="was stopped by a signal"), True),
        (Event(ERROR, 2, "n3", status=1 << 8, text=_CLOSED), True),
        (Event(ERROR, 2, "n3", status=1 << 8, text="ncclSystemError: System call failed (NCCL)"), True),
        (Event(ERROR, 2, "n3", status=1 << 8, text="ValueError: a"), False),
        (Event(LEFT, 2, "n3"), False),
    ],
)
def test_a_loss_is_what_the_program_has_not_told_of(event: Event, is_loss: bool):
    assert event.is_loss is is_loss


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (Event(KILLED, 2, "n3", status=9), 137),
        (Event(KILLED, 2, "n3", status=11), 139),
        (Event(KILLED, 2, "n3", status=15), 0),  # its launcher knows why
        (Event(ERROR, 2, "n3", status=7 << 8), 7),
        (Event(ERROR, 2, "n3", status=1 << 8, text=_CLOSED), 0),
        (Event(GONE, 2, "n3"), 0),
        (Event(LEFT, 2, "n3"), 0),
    ],
)
def test_the_job_s_status_is_that_of_the_rank_that_failed_whoever_ends_first(event: Event, status: int):
    assert event.exit_status == status


def test_events_are_said_with_rank_host_and_step():
    assert str(Event(KILLED, 2, "n3", status=11)) == "rank 2 on n3 was killed by SIGSEGV"
    assert str(Event(ERROR, 2, "n3", status=1 << 8, text="ValueError: a")) == "rank 2 on n3: ValueError: a"
    assert str(Event(ERROR, 2, "n3", status=7 << 8)) == "rank 2 on n3 ended with status 7"
    assert str(Event(SILENT, 2, "n3", step=812)) == "n3 is silent since step 812 (rank 2)"
    assert str(Event(GONE, 2, "n3", step=812)) == "rank 2 on n3 vanished without a word after step 812"
    stuck = Event(STUCK, 2, "n3", step=812, text="stands at train.py:4, in main: f()")
    assert str(stuck) == "no rank gets on since step 812; rank 2 on n3 stands at train.py:4, in main: f()"
    left = Event(LEFT, 2, "n3", status=85 << 8, text="others wait for it in hpcddp's runtime")
    assert str(left) == "rank 2 on n3 ended with status 85 while others wait for it in hpcddp's runtime"
    assert str(Event(LEFT, 2, "n3")) == "rank 2 on n3 ended with status 0 while others still trained"


@pytest.mark.parametrize(
    ("text", "is_loss", "status"),
    [
        ("ConnectionRefusedError: [Errno 111] Connection refused (database)", False, 1),
        ("backend: gloo, 8 layers", False, 1),
        ("ValueError: NCCL is a word", False, 1),
        (_CLOSED, True, 0),
        ("torch.distributed.DistBackendError: NCCL error in: /opt/x.cpp:1", True, 0),
        ("hpcddp: 2 of 8 ranks did not arrive in 300 s: rank 2, 3", True, 0),
    ],
)
def test_only_what_torch_or_the_network_says_is_no_error_of_the_program(text: str, is_loss: bool, status: int):
    alone = find_first_cause([Event(ERROR, 2, "n3", 1.0, status=_EXITED[1], text=text)])
    assert alone is not None
    assert (alone.is_loss, alone.exit_status) == (is_loss, status)
