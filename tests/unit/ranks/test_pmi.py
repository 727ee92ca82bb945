"""PMI-1 as Hydra speaks it, against a small server in this process. Real launchers: tests/multirank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hpcddp.ranks.pmi import PmiClient

from hpcddp.errors import LaunchError
from hpcddp.ranks import pmi

# What the two launchers answered; words differ in number and order.
MPICH = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=kvs_1",
    "put": "cmd=put_result rc=0",
    "barrier_in": "cmd=barrier_out tag=0",
    "get": "cmd=get_result rc=0 value={value}",
    "missing": "cmd=get_result rc=1",
    "finalize": "cmd=finalize_ack rc=0",
}
INTEL = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 msg=success value={value}",
    "missing": "cmd=get_result rc=-1 msg=key_none_not_found value=unknown",
    "finalize": "cmd=finalize_ack",
}


class Server:
    """One rank's launcher: answers until the rank hangs up, and remembers what was asked."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.ours, self.ranks = socket.socketpair()
        self.answers, self.store, self.asked = answers, {}, []  # type: ignore[var-annotated]  # str -> str, list of str
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        for line in self.ours.makefile():
            words = dict(word.split("=", 1) for word in line.split())
            self.asked.append(words["cmd"])
            answer = self.answers.get(words["cmd"])
            if words["cmd"] == "put":
                self.store[words["key"]] = words["value"]
            if words["cmd"] == "get" and words["key"] not in self.store:
                answer = self.answers["missing"]
            if answer is not None:
                self.ours.sendall((answer.format(value=self.store.get(words.get("key", ""))) + "\n").encode())

    def close(self) -> None:
        for end in (self.ranks, self.ours):
            end.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.ranks.close()
        self.ours.close()


@pytest.fixture(params=[MPICH, INTEL], ids=["mpich", "intelmpi"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(dict(request.param))
    yield server
    server.close()


def test_rank_0s_value_reaches_every_rank(server: Server) -> None:
    client = PmiClient(server.ranks.fileno(), 600)
    assert pmi.share_from_rank_0(client, 0, "addr", "node1:12345") == "node1:12345"
    assert pmi.share_from_rank_0(client, 1, "addr", "ignored") == "node1:12345"
    client.finalize()
    client.finalize()
    asked = ["init", "get_my_kvsname", "put", "barrier_in", "get", "barrier_in", "get", "finalize"]
    assert server.asked == asked


def test_a_key_that_nobody_put_is_an_error(server: Server) -> None:
    with pytest.raises(LaunchError, match="answered PMI get"):
        PmiClient(server.ranks.fileno(), 600).get("none")


def test_a_launcher_that_does_not_answer_is_an_error_after_the_limit(server: Server) -> None:
    del server.answers["barrier_in"]
    client = PmiClient(server.ranks.fileno(), 0.05)
    with pytest.raises(LaunchError, match="did not answer PMI barrier_in within"):
        client.barrier()
