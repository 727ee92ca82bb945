"""Who calls the supervisor and is no rank: a scan of ports, or more callers than files may be open."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.runs.folder import RunFolder
from hpcddp.supervisor import wire
from hpcddp.supervisor.reports import Reports
from hpcddp.supervisor.wire import SupervisorAddress, read_supervisor_address


class Node:
    """The supervisor, with a clock that is told, and who calls it."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.reports = Reports(0.0, {}, lambda: self.now)
        attempt = RunFolder(str(folder)).attempt("7.1")
        os.makedirs(attempt.path)
        self.reports.open(attempt)
        told = read_supervisor_address(attempt)
        assert told is not None
        self.told: SupervisorAddress = told
        self.sockets: list[socket.socket] = []

    def call(self, line: bytes = b"") -> socket.socket:
        caller = socket.create_connection(("127.0.0.1", self.told.port))
        self.sockets.append(caller)
        caller.sendall(line)
        return caller

    def call_as_rank(self, rank: int) -> None:
        self.call(wire.write(wire.Hello(self.told.key, "7.1", rank, 2, f"n{rank}")))

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.reports.read()
            self.reports.check()

    def wait_for(self, rank: int) -> None:
        """The test's own timeout ends what never comes."""
        while rank not in self.reports.ranks:
            self.reports.read()
            self.reports.check()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.reports.close()
    for one in node.sockets:
        one.close()


def test_after_a_caller_that_could_not_be_let_in_the_next_ones_are(node: Node):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        node.call_as_rank(0)
        node.call_as_rank(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        node.reports.read()
        assert select.select([node.reports.entry], [], [], 0)[0] == []  # it does not turn in a circle until then
        assert node.reports.ranks == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    node.wait_for(0)
    node.wait_for(1)


def test_who_calls_and_says_nothing_is_closed_after_a_while(node: Node):
    idle = [node.call(b"hel") for _ in range(3)]
    while len(node.reports._callers) < 3:
        node.reports.read()
    node.call_as_rank(0)
    node.wait_for(0)
    node.pass_time(13)
    assert [caller.recv(10) for caller in idle] == [b"", b"", b""]
