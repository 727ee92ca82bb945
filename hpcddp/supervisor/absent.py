"""Ranks that nobody has heard of, long after their launcher was started."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING
from hpcddp.supervisor.events import ABSENT, Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.supervisor.rank_report import RankReport


def find_absent(
    ranks: Mapping[int, RankReport], world_size: int, waited_s: float, now: float, records: str
) -> Event | None:
    """A launcher may wait for a host for ever, and the ranks that are there for those that are not. None: all are
    there, or those that are do not wait. `world_size`: 0 as long as no rank has said it. `records`: the folder in which
    each rank that is started leaves a file."""
    if not ranks:
        if has_files(records):  # they were started, and cannot call here
            return None
        return Event(ABSENT, -1, "", now, text=f"no rank was started in {waited_s:.0f} s")
    is_waiting = any(one.beat.looks for one in ranks.values()) and not any(one.beat.step for one in ranks.values())
    if not is_waiting or len(ranks) >= (world_size or 1):
        return None
    missing = next(rank for rank in range(world_size) if rank not in ranks)
    text = (
        f"{world_size - len(ranks)} of {world_size} ranks were not started in {waited_s:.0f} s,"
        f" the first of them rank {missing}"
    )
    return Event(ABSENT, missing, "", now, text=text)


def has_files(folder: str) -> bool:
    """Whether ranks were started: each leaves a file there."""
    with suppress(OSError):
        return bool(os.listdir(folder))
    return False
