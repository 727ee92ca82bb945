"""When no rank gets on, and which of them the others wait for; times are told."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from hpcddp.guard.hpcddp_stand import MAY_WAIT, NO_WAIT, WAITS
from hpcddp.runs.hang import Stand
from hpcddp.runs.heartbeat import Beat
from hpcddp.supervisor.rank import (
    ENDS,
    STARTING,
    STATES,
    PlainHang,
    PlainRank,
    Rank,
    StuckDetector,
    describe_late,
    describe_stand,
    find_late,
)

LIMIT_S = 60.0
FIRST_S = 10 * LIMIT_S  # the first step has so long


class Ranks:
    """Of one attempt; they say each second what they are told to say."""

    def __init__(self, count: int) -> None:
        self.detector, self.now, self.is_known = StuckDetector(LIMIT_S), 1000.0, False
        self.ranks = [Rank(rank, f"n{rank}", self.now) for rank in range(count)]

    def pass_time(self, seconds: float, step: int = 0, moves: Collection[int] = (), uses: Collection[int] = ()) -> None:
        """Ranks that have opened the runtime say that they are there; `moves`, `uses`: those that get on, or only use
        the processor."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            for one in self.ranks:
                if one.beat.looks:
                    self.say(one.rank, step, moves=one.rank in moves, uses=one.rank in uses)

    def say(self, rank: int, step: int = 0, *, moves: bool = False, uses: bool = False) -> None:
        beat = self.ranks[rank].beat
        new = Beat(step or beat.step, beat.moves + moves, beat.looks + 1, 0, beat.uses + uses)
        self.detector.record(self.ranks[rank], new, self.now)

    def end(self, rank: int) -> None:
        """Its program has ended well."""
        self.ranks[rank].status = 0
        self.ranks[rank].change(ENDS, self.now)

    def stuck(self) -> list[str]:
        found, _, self.is_known = self.detector.find_blocking(self.ranks, self.now)
        return [f"rank {one.rank} {describe_stand(one)}" for one in found]


def test_the_first_step_has_ten_times_the_limit():
    ranks = Ranks(1)
    ranks.say(0, moves=True)
    ranks.ranks[0].place = Stand("train.py:7, in main: sleep()")
    ranks.pass_time(FIRST_S)
    assert ranks.stuck() == []
    ranks.pass_time(2)
    assert ranks.stuck() == ["rank 0 stands at train.py:7, in main: sleep()"]


def test_a_rank_that_has_not_opened_the_runtime_is_the_one_that_others_wait_for():
    ranks = Ranks(3)
    for rank in (0, 2):
        ranks.say(rank, moves=True)
        ranks.ranks[rank].place = Stand("train.py:29, in main (in wait_until)", waits=WAITS)
    ranks.pass_time(FIRST_S)
    assert ranks.stuck() == []
    ranks.pass_time(2)
    assert ranks.stuck() == ["rank 1 has not opened hpcddp's runtime, as others have"]


def test_a_rank_that_has_ended_before_it_opened_the_runtime_is_named_after_the_limit_of_a_step():
    ranks = Ranks(3)
    for rank in (0, 2):
        ranks.say(rank, moves=True)
    ranks.end(1)
    ranks.pass_time(LIMIT_S)
    assert ranks.stuck() == []
    ranks.pass_time(2)
    assert ranks.stuck() == ["rank 1 others wait for it in hpcddp's runtime"]


@pytest.mark.parametrize("says", ["nothing", "steps", "left"])
def test_a_rank_that_has_ended_is_not_missed_where_nobody_waits_for_it(says: str):
    """As of programs without the runtime, or after it."""
    ranks = Ranks(2)
    if says == "steps":
        for step in (4, 5):
            ranks.say(0, step=step, moves=True)
    elif says == "left":
        ranks.say(0, moves=True)
        ranks.detector.record(ranks.ranks[0], Beat(0, 1, 0), ranks.now)
    ranks.end(1)
    ranks.pass_time(FIRST_S + 2, step=5, moves={0} if says == "steps" else ())
    assert ranks.stuck() == []


def test_of_ranks_that_have_not_opened_the_runtime_one_that_a_signal_has_stopped_comes_first():
    ranks = Ranks(3)
    ranks.say(0, moves=True)
    ranks.ranks[2].beat = Beat(is_stopped=True)
    ranks.pass_time(FIRST_S + 2)
    assert ranks.stuck() == ["rank 2 was stopped by a signal"]


def test_ranks_that_never_open_the_runtime_are_not_named_where_the_others_make_steps():
    ranks = Ranks(2)
    ranks.say(0, step=4, moves=True)
    ranks.say(0, step=5, moves=True)
    ranks.ranks[0].place = Stand("train.py:7, in main: sleep()")
    ranks.pass_time(LIMIT_S + 2)
    assert ranks.stuck() == ["rank 0 stands at train.py:7, in main: sleep()"]


@pytest.fixture
def training() -> Ranks:
    """Two ranks after some steps of a second each."""
    ranks = Ranks(2)
    for step in range(1, 5):
        for rank in range(2):
            ranks.say(rank, step, moves=True)
        ranks.now += 1
    ranks.ranks[0].place = Stand("train.py:9, in main: rt.step() (in all_reduce)", waits=WAITS)
    ranks.ranks[1].place = Stand("train.py:7, in main: while True: pass")
    return ranks


@pytest.mark.parametrize(
    ("one", "other", "named", "is_known"),
    [
        (("a", MAY_WAIT), ("b", NO_WAIT), "rank 1 ", True),  # in DDP's backward pass it waits for the others
        (("a", WAITS), ("b", MAY_WAIT), "rank 1 ", True),
        (("a", NO_WAIT), ("b", NO_WAIT), "rank 0 ", False),
        (("a", WAITS), ("a", WAITS), "rank 0 ", False),
        (("", NO_WAIT), ("", NO_WAIT), "rank 0 is one of them", False),
    ],
)
def test_of_two_ranks_the_one_that_does_not_wait_is_named_if_that_can_be_told(
    training: Ranks, one: tuple[str, int], other: tuple[str, int], named: str, is_known: bool
):
    training.ranks[0].place, training.ranks[1].place = (Stand(line, waits=waits) for line, waits in (one, other))
    training.pass_time(LIMIT_S + 2)
    (found,) = training.stuck()
    assert (found.startswith(named), training.is_known) == (True, is_known)


@pytest.mark.parametrize("uses", [{1}, {0, 1}], ids=["one", "all, as those do that wait for a GPU"])
def test_ranks_that_stand_and_use_the_processor_have_ten_times_as_long(training: Ranks, uses: set[int]):
    training.pass_time(10 * LIMIT_S - 5, uses=uses)
    assert training.stuck() == []
    training.pass_time(10, uses=uses)
    assert training.stuck() == ["rank 1 stands at train.py:7, in main: while True: pass"]


def test_ranks_that_stand_and_do_not_use_the_processor_have_the_limit(training: Ranks):
    training.pass_time(100, uses={1})
    training.pass_time(LIMIT_S - 5)
    assert training.stuck() == []
    training.pass_time(10)
    assert training.stuck() == ["rank 1 stands at train.py:7, in main: while True: pass"]


def test_the_limit_of_what_uses_the_processor_is_learnt_from_the_longest_that_the_run_has_seen(training: Ranks):
    training.pass_time(500, uses={1})  # one call that takes so long, as it does after each epoch
    training.pass_time(1, step=5, moves={0, 1})
    training.pass_time(4900, uses={1})
    assert training.stuck() == []
    training.pass_time(200, uses={1})
    assert training.stuck() != []


def test_a_program_that_says_nothing_of_itself_is_never_stuck_and_one_that_touches_its_page_is():
    ranks = Ranks(1)
    one = ranks.ranks[0]

    def beat(touched: int) -> None:
        ranks.detector.record(one, Beat(touched=touched), ranks.now)

    beat(1)
    ranks.now += 2 * FIRST_S
    beat(1)
    assert ranks.stuck() == []
    beat(2)
    ranks.now += LIMIT_S
    beat(2)
    assert ranks.stuck() == []
    ranks.now += 20 * FIRST_S
    beat(2)
    assert ranks.stuck() == ["rank 0 is one of them"]


def test_a_page_whose_time_is_set_back_was_not_touched():
    """What else is written there sets it back; on a busy node an agent reads the page in the middle of that."""
    ranks = Ranks(1)
    for touched in (1, 2, 1, 1):
        ranks.detector.record(ranks.ranks[0], Beat(touched=touched), ranks.now)
    ranks.now += 20 * FIRST_S
    assert ranks.stuck() == []


# Plain scripts, by the stands that the guard in each rank tells.

SUM = Stand("train.py:9, in main: dist.all_reduce(x)", "all_reduce", 61.0, WAITS)
OWN_WORK = Stand("train.py:7, in main: queue.get()", "wait", 61.0, NO_WAIT)
ENDED = Stand("", "", 0.0, -1)  # no stand: it has ended with status 0


def make_plain(*stands: Stand | None, now: float = 1000.0) -> list[Rank]:
    ranks = [Rank(rank, f"n{rank}", now) for rank in range(len(stands))]
    for one, stand in zip(ranks, stands, strict=True):
        if stand is not None:
            one.plain[one.rank] = PlainRank()
            one.plain[one.rank].record(stand, now)
        one.status = 0 if stand is ENDED else None
        one.since = now - 61.0
    return ranks


@pytest.mark.parametrize(
    ("stands", "is_printed", "missing"),
    [
        ([SUM, OWN_WORK, SUM], True, [1]),
        ([SUM, ENDED, SUM], True, [1]),
        ([SUM, SUM, SUM], True, []),  # a slow network
        ([SUM, None, SUM], True, []),  # it has left its group, or holds Python's lock: "no answer"
        ([SUM, OWN_WORK._replace(seconds=0.0), SUM], True, []),  # it gets on
        ([SUM._replace(seconds=59.0), OWN_WORK, SUM._replace(seconds=0.0)], False, []),
        ([OWN_WORK, OWN_WORK, OWN_WORK._replace(line="train.py:8")], False, []),  # their work is in other threads
        ([None, None, None], False, []),
    ],
)
def test_of_plain_scripts_a_hang_is_a_rank_that_waits_in_a_collective_while_no_rank_gets_on(
    stands: list[Stand | None], is_printed: bool, missing: list[int]
) -> None:
    text, late = PlainHang(60.0, 60.0).check(make_plain(*stands), 3, 1000.0)
    assert (bool(text), late) == (is_printed, missing)


def test_where_the_ranks_stand_is_printed_once_until_one_gets_on() -> None:
    hang = PlainHang(60.0, None)
    assert "rank 1  no answer" in hang.check(make_plain(SUM, None), 2, 1000.0)[0]
    assert hang.check(make_plain(SUM, OWN_WORK), 2, 1001.0) == ("", [])
    assert hang.check(make_plain(OWN_WORK, OWN_WORK), 2, 1002.0) == ("", [])
    assert "nothing is ended;" in hang.check(make_plain(SUM, OWN_WORK), 2, 1003.0)[0]
    assert PlainHang(None, None).check(make_plain(SUM, OWN_WORK), 2, 1000.0) == ("", [])


def test_a_rank_that_does_not_say_for_long_where_it_stands_is_no_culprit_and_a_stopped_one_is() -> None:
    ranks = make_plain(SUM, OWN_WORK)
    assert find_late(ranks, 1010.0) == [1]
    assert describe_late(1, ranks, 1010.0) == f"stands at {OWN_WORK}; others wait for it at {SUM}"
    assert find_late(ranks, 1020.0) == []
    ranks[1].beat = Beat(is_stopped=True)
    assert find_late(ranks, 1020.0) == [1]
    assert describe_late(1, ranks, 1020.0).startswith("stands at a stop by a signal (SIGSTOP)")


def test_the_ranks_of_an_agent_are_named_by_their_own_numbers() -> None:
    agents = [Rank(0, "n0", 1000.0), Rank(1, "n1", 1000.0)]
    for rank, stand in enumerate([SUM, SUM, SUM, OWN_WORK]):
        agents[rank // 2].plain[rank] = PlainRank()
        agents[rank // 2].plain[rank].record(stand, 1000.0)
    text, late = PlainHang(60.0, 60.0).check(agents, 4, 1000.0)
    assert late == [3]
    assert f"rank 3 at {OWN_WORK}. The others: ranks 0-2 at {SUM}" in text


def test_of_ranks_that_all_wait_none_is_said_to_be_waited_for() -> None:
    ranks = make_plain(SUM, SUM._replace(line="train.py:12, in main: dist.barrier()"))
    assert PlainHang(60.0, 60.0).check(ranks, 2, 1000.0)[1] == [0, 1]
    assert describe_late(0, ranks, 1000.0) == (
        f"waits at {SUM}; others wait at train.py:12, in main: dist.barrier() (in all_reduce)"
    )


def test_each_state_of_a_rank_can_be_come_to_and_leads_to_states_of_the_table() -> None:
    after = {state for row in STATES.values() for state in row.next.values() if state}
    assert after | {STARTING} == {*STATES}
