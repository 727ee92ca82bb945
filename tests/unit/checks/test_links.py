"""Pairs of hosts in rounds, and the slow host or link that their numbers show: made of numbers, on up to 64 hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from hpcddp.checks.job import (
    ALL_S,
    LOOK_S,
    MOST_S,
    NAME_S,
    PAIR_S,
    LinkSpeed,
    count_rounds,
    find_slow,
    judge_links,
    plan_round,
)

FAST, SLOW = LinkSpeed(380.0, 0.02), LinkSpeed(90.0, 0.02)


def exchange_all(size: int, measure: Callable[[str, str], LinkSpeed]) -> dict[tuple[str, str], LinkSpeed]:
    hosts = [f"n{at}" for at in range(size)]
    found: dict[tuple[str, str], LinkSpeed] = {}
    for number in range(count_rounds(size)):
        pairs = plan_round(hosts, number, found)
        found |= {pair: measure(*pair) for pair in pairs}
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 15, 16])
def test_of_few_hosts_every_pair_meets_once_and_nobody_twice_in_a_round(size: int) -> None:
    hosts = [f"n{at}" for at in range(size)]
    met = []
    for number in range(count_rounds(size)):
        pairs = plan_round(hosts, number, {})
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len({*busy})
        met += [frozenset(pair) for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(hosts, 2)))


@pytest.mark.parametrize("size", [17, 33, 64, 65])
def test_of_many_hosts_each_meets_two_others_and_a_slow_one_a_fast_one(size: int) -> None:
    found = exchange_all(size, lambda a, b: SLOW if "n7" in {a, b} else FAST)
    hosts = [f"n{at}" for at in range(size)]
    assert all(sum(host in pair for pair in found) >= 2 for host in hosts)
    assert len({frozenset(pair) for pair in found}) == len(found)
    first = {*plan_round(hosts, 0, {})}
    second = [pair for pair in found if pair not in first]
    partner = next(host for pair in first if "n7" in pair for host in pair if host != "n7")
    for slow in ("n7", partner):
        other = next(host for pair in second if slow in pair for host in pair if host != slow)
        assert max(one.gbps for pair, one in found.items() if other in pair) == FAST.gbps


@pytest.mark.parametrize("size", [3, 4, 5, 16, 17, 64])
@pytest.mark.parametrize("ill", [0, 1, 2])
def test_the_slow_host_is_named_and_no_other(size: int, ill: int) -> None:
    found = exchange_all(size, lambda a, b: SLOW if f"n{ill}" in {a, b} else FAST)
    assert [(host, check.name) for host, check in judge_links(found, on_gpu=True)] == [(f"n{ill}", "slow host")]


@pytest.mark.parametrize("size", [18, 31, 62, 64])
def test_no_two_of_many_hosts_meet_twice_whatever_they_have_measured(size: int) -> None:
    hosts = [f"n{at}" for at in range(size)]
    for seed in range(50):
        rates = {host: hash((seed, at)) % 97 for at, host in enumerate(hosts)}
        found = {(a, b): LinkSpeed(float(min(rates[a], rates[b]))) for a, b in plan_round(hosts, 0, {})}
        second = plan_round(hosts, 1, found)
        assert not {frozenset(pair) for pair in second} & {frozenset(pair) for pair in found}
        assert {host for pair in second for host in pair} == {*hosts}


def test_two_slow_hosts_of_64_are_both_named() -> None:
    found = exchange_all(64, lambda a, b: SLOW if {a, b} & {"n4", "n51"} else FAST)
    assert {host for host, check in judge_links(found, on_gpu=True) if check.name == "slow host"} == {"n4", "n51"}


@pytest.mark.parametrize("size", [4, 16])
def test_a_slow_link_is_named_by_both_its_hosts(size: int) -> None:
    found = exchange_all(size, lambda a, b: SLOW if {a, b} == {"n1", "n3"} else FAST)
    ((_, check),) = judge_links(found, on_gpu=True)
    assert check.name == "slow link"
    assert {"n1", "n3"} <= {*check.message.replace(" with ", " ").split()}


def test_a_host_that_exchanges_nothing_is_slow_and_two_hosts_have_one_link() -> None:
    dead = LinkSpeed(error="no answer in 8 s")
    found = exchange_all(4, lambda a, b: dead if "n2" in {a, b} else FAST)
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


def test_on_64_hosts_the_limits_of_all_parts_fit_into_a_minute_but_for_what_is_cut_off() -> None:
    assert LOOK_S + NAME_S + count_rounds(64) * PAIR_S + ALL_S <= MOST_S
