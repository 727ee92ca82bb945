"""The states of a rank, as the supervisor sees it."""

from __future__ import annotations

import pytest

from hpcddp.supervisor.events import GONE, SILENT
from hpcddp.supervisor.rank import (
    BREAKS,
    CALLS,
    CLOSED,
    CLOSES,
    DEFERRED,
    DEFERS,
    DISCONNECTED,
    ENDED,
    ENDS,
    FALLS_SILENT,
    MOVES,
    OPENS,
    STANDING,
    STANDS,
    STARTING,
    STATES,
    STAYS_AWAY,
    STEPPING,
    TOUCHES,
    Rank,
)


@pytest.mark.parametrize(
    ("happens", "state"),
    [
        ([STANDS], STARTING),  # its program has opened nothing: where it stands says nothing
        ([OPENS], STEPPING),
        ([TOUCHES], STEPPING),
        ([OPENS, STANDS], STANDING),
        ([OPENS, STANDS, MOVES], STEPPING),
        ([OPENS, CLOSES], CLOSED),
        ([OPENS, CLOSES, TOUCHES], CLOSED),
        ([OPENS, CLOSES, OPENS], STEPPING),
        ([OPENS, BREAKS], DISCONNECTED),
        ([OPENS, CLOSES, BREAKS, CALLS], CLOSED),  # as before
        ([OPENS, STANDS, BREAKS, STAYS_AWAY], GONE),
        ([OPENS, STANDS, BREAKS, STAYS_AWAY, CALLS], STANDING),
        ([STAYS_AWAY], STARTING),
        ([OPENS, FALLS_SILENT, MOVES], SILENT),
        ([OPENS, FALLS_SILENT, ENDS], ENDED),
        ([OPENS, DEFERS], DEFERRED),
        ([OPENS, DEFERS, FALLS_SILENT], DEFERRED),
        ([OPENS, DEFERS, BREAKS], ENDED),
        ([OPENS, ENDS, BREAKS, CALLS], ENDED),
    ],
)
def test_what_happens_to_a_rank_leads_to_its_state_by_the_table(happens: list[str], state: str):
    rank = Rank(0, "n0", 0.0)
    for one in happens:
        is_event = rank.change(one, 1.0)
    assert (rank.state, rank.has_opened) == (state, bool({OPENS, TOUCHES} & {*happens}))
    assert is_event == (happens[-1] in {FALLS_SILENT, STAYS_AWAY} and state in {GONE, SILENT})


def test_each_state_can_be_come_to_and_leads_to_states_of_the_table():
    after = {state for row in STATES.values() for state in row.next.values() if state}
    assert after | {STARTING} == {*STATES}
