"""The messages between the supervisor and the ranks' agents."""

from __future__ import annotations

import pytest

from hpcddp.guard.hpcddp_stand import WAITS
from hpcddp.runs.hang import Stand
from hpcddp.runs.heartbeat import Beat
from hpcddp.supervisor import wire

EACH = [
    wire.Hello("0f", "7.1", 3, 8, "node 1%20"),
    Beat(12, 3, 4, 1700000000000000001, 5, is_stopped=True),
    Stand("train.py:9, in main: größer\n\t", "all_reduce", waits=WAITS),
    wire.PlainStand(3, 8, "train.py:7, in main: work()", "wait", 61.5, WAITS, 40, 7.5),
    Stand(),
    wire.Stacks("17-4", 1, 3, 'Thread 0x1 (most recent call first):\n  File "a b.py", line 7 in f\n', ""),
    wire.Signalled(10),
    wire.Ended(256, "ValueError: a  b %0A\nc", "runs/x y/log", is_printed=True),
    wire.Ended(0, unheard_s=46),
    wire.Ok(),
    wire.Kill(),
    wire.Until(1795446000.5),
    wire.Give(2, 15),
    wire.Ask("17-4"),
    wire.Wait(299.5),
    wire.Content('{"a b": "%0A\\n"}'),
]


def test_each_message_is_one_line_and_is_read_as_it_was_written_however_the_line_is_cut():
    assert {type(message) for message in EACH} == set(wire.MESSAGES.values())
    lines = b"".join(map(wire.write, EACH))
    assert lines.count(b"\n") == len(EACH)
    for size in (1, 7, len(lines)):
        incoming = wire.Incoming()
        read = [one for at in range(0, len(lines), size) for one in incoming.add(lines[at : at + size])]
        assert [(type(one), one) for one in read] == [(type(one), one) for one in EACH]


@pytest.mark.parametrize("line", [b"", b"GET / HTTP/1.1", b"ok ok", b"give 1", b"give 1 x", b"signalled 1 2", b"\xff"])
def test_a_line_that_is_no_message_is_left_out(line: bytes):
    assert wire.Incoming().add(line + b"\nok\n") == [wire.Ok()]
