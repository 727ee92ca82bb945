"""Which pairs of hosts exchange data, the slow host or link that their numbers show, and the checker with 64 hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import combinations, islice
from pathlib import Path

import pytest

from hpcddp.checks.environment import FAILED, OK, WARNING
from hpcddp.checks.job import (
    Checker,
    CheckRequest,
    LinkSpeed,
    find_slow,
    format_report,
    judge_links,
    plan_pairs,
    split_rounds,
)

FAST, SLOW = LinkSpeed(380.0, 0.02), LinkSpeed(90.0, 0.02)


Found = dict[tuple[str, str], LinkSpeed]


def exchange_all(size: int, measure: Callable[[str, str], LinkSpeed]) -> list[Found]:
    """What is found by each list of pairs, until only slow ones are tried again."""
    found: Found = {}
    lists = list[Found]()
    plan = plan_pairs([f"n{at}" for at in range(size)], found, on_gpu=True)
    for pairs in islice(plan, 1 if size <= 16 else 2):
        assert not {frozenset(pair) for pair in found} & {frozenset(pair) for pair in pairs}
        lists.append({pair: measure(*pair) for pair in pairs})
        found.update(lists[-1])
    return lists


def merge(lists: list[Found]) -> Found:
    return {pair: one for found in lists for pair, one in found.items()}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 15, 16])
def test_of_few_hosts_every_pair_meets_once_and_nobody_twice_in_a_round(size: int) -> None:
    hosts = [f"n{at}" for at in range(size)]
    (found,) = exchange_all(size, lambda _a, _b: FAST)
    rounds = split_rounds(found)
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len({*busy})
    assert len(rounds) <= 15
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(hosts, 2)))


@pytest.mark.parametrize("size", [17, 33, 64, 65])
def test_of_many_hosts_each_meets_two_others_and_a_slow_one_a_fast_one(size: int) -> None:
    first, second = exchange_all(size, lambda a, b: SLOW if "n7" in {a, b} else FAST)
    assert all(sum(host in pair for pair in (*first, *second)) >= 2 for host in (f"n{at}" for at in range(size)))
    partner = next(host for pair in first if "n7" in pair for host in pair if host != "n7")
    for slow in ("n7", partner):
        other = next(host for pair in second if slow in pair for host in pair if host != slow)
        assert max(one.gbps for pair, one in {**first, **second}.items() if other in pair) == FAST.gbps
    assert len(split_rounds(first)) == 1
    assert len(split_rounds(second)) == 1 + size % 2


@pytest.mark.parametrize(
    ("size", "hosts", "links"),
    [
        *[(size, {f"n{ill}"}, []) for size in (3, 4, 5, 16, 17, 64) for ill in (0, 1, 2)],
        (64, {"n4", "n51"}, []),
        *[(size, set(), [{"n1", "n3"}]) for size in (4, 16)],
        (4, {"n0"}, [{"n1", "n3"}]),
    ],
)
def test_slow_hosts_and_links_are_named_and_no_others(size: int, hosts: set[str], links: list[set[str]]) -> None:
    found = merge(exchange_all(size, lambda a, b: SLOW if {a, b} & hosts or {a, b} in links else FAST))
    named = [(host, check) for host, check in judge_links(found, on_gpu=True)]
    assert {host for host, check in named if check.name == "slow host"} == hosts
    words = [{*check.message.split()[0:3:2]} for _, check in named if check.name == "slow link"]
    assert words == links


def test_a_host_that_exchanges_nothing_is_slow_and_two_hosts_have_one_link() -> None:
    dead = LinkSpeed(error="no answer in 8 s")
    (found,) = exchange_all(4, lambda a, b: dead if "n2" in {a, b} else FAST)
    ((host, check),) = judge_links(found, on_gpu=True)
    assert (host, check.name) == ("n2", "slow host")
    assert "no answer in 8 s" in check.message
    ((_, check),) = judge_links({("a", "b"): dead}, on_gpu=True)
    assert check.name == "slow link"
    assert list(judge_links({("a", "b"): FAST}, on_gpu=True)) == []


@pytest.mark.parametrize(
    ("one", "on_gpu", "is_slow"),
    [
        (LinkSpeed(200.0, 0.02), True, False),
        (LinkSpeed(180.0, 0.02), True, True),
        (LinkSpeed(2.0, 0.02), False, False),  # a busy CPU's share
        (LinkSpeed(0.9, 0.02), False, True),
        (LinkSpeed(380.0, 15.0), True, True),
    ],
)
def test_slow_is_below_half_of_the_median_and_between_cpus_far_below_it(
    one: LinkSpeed, on_gpu: bool, is_slow: bool
) -> None:
    found = {(f"n{at}", f"n{at + 1}"): FAST for at in range(4)} | {("x", "y"): one}
    assert (("x", "y") in find_slow(found, on_gpu=on_gpu)) == is_slow


def test_a_host_whose_exchange_does_not_end_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"a": {"address": "a", "port": 1}}, {"b": {"gbps": 1.0, "ms": 1.0}}])
    monkeypatch.setattr(Checker, "_ask", lambda *_: next(answers))
    (said,) = Checker(CheckRequest(()), {})._run_groups([("a", "b")], False, 8.0, is_sum=False)
    assert said == {"host": "a", "error": "no answer in 8 s"}


PLAY = """
import json, select, socket, sys, time
from hpcddp.checks.node import CheckedNode, Process
from hpcddp.supervisor.wire import Content, Incoming, write

key, port, _ = sys.argv[-1].split(":", 2)
hosts, poll = {}, select.poll()
send = lambda connection, content: connection.sendall(write(Content(json.dumps(content))))
stranger = socket.create_connection(("localhost", int(port)))
send(stranger, {"key": "a guess", "process": Process("n99", 0, 64)._asdict()})
for rank in range(64):
    connection = socket.create_connection(("localhost", int(port)))
    process = Process(f"n{rank}", rank, 64, 0, 1)._asdict()
    hosts[connection.fileno()] = connection, f"n{rank}", process, Incoming()
    send(connection, {"key": key, "process": process})
    poll.register(connection, select.POLLIN)

tries = []

def answer(host, process, order):
    slow = "n7" in {host, order.get("address")}
    if order.get("what") == "exchange" and host == "n20":
        tries.append(order)
        slow = len(tries) == 1  # something else has been
    return {
        "describe": {"node": CheckedNode(host, 8.0, files=99 if host == "n9" else 9999)._asdict(), "gpus": []},
        "measure": {"process": process, "gpus": []},
        "clock": {"time": time.time() + (90 if host == "n11" else 0)},
        "listen": {"host": host, "port": 1} if host == "n0" else {"error": "rank 0 is elsewhere"},
        "reach": {"errors": {"rank 0's port": "no answer"} if host == "n3" else {}},
        "open_store": {"address": host, "port": 1},
        "exchange": {"gbps": 0.1 if slow else 10.0, "ms": 0.02, "all_reduce_gbps": 5.0},
    }[order.get("what") or order["do"]]

while True:
    for number, _ in poll.poll():
        connection, host, process, incoming = hosts[number]
        data = connection.recv(65536)
        if not data:
            sys.exit()
        for order in incoming.add(data):
            send(connection, answer(host, process, json.loads(order.text)))
"""


def test_of_64_hosts_the_ill_ones_are_named_and_the_slow_one_after_two_rounds(tmp_path: Path) -> None:
    launcher = tmp_path / "play.py"
    launcher.write_text(PLAY)
    expected = tuple(f"n{at}" for at in range(64))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    report = Checker(CheckRequest((sys.executable, str(launcher)), hosts=expected, patience=20), env).check()
    found = {host: check.name for host, check in report.checks}
    assert found == {"n9": "open files", "n3": "rank 0's port", "n7": "slow host", "n11": "clock"}
    assert report.hosts == dict.fromkeys(expected, OK) | dict.fromkeys(found, FAILED) | {"n11": WARNING}
    met = [sum(host in pair for pair in report.links) for host in expected if host not in {"n3", "n9"}]
    assert met == [2] * 62
    assert report.all_reduce_gbps == 5.0
    assert format_report(report).endswith(" s: failed: n3, n7, n9\n")
