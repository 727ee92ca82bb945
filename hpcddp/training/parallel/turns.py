"""The order in which a stage of a pipeline takes its micro batches."""

from __future__ import annotations

SCHEDULES = ("1f1b", "gpipe")


def plan_turns(schedule: str, stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """(whether forward, micro batch) in the order in which a stage takes `count` micro batches.

    GPipe: all forward, then all backward. 1F1B: as soon as a micro batch can go back it does, so that a stage holds as
    many as there are stages behind it, at most.
    """
    ahead = count if schedule == "gpipe" else min(count, stages - 1 - stage)
    turns = [(True, nth) for nth in range(ahead)]
    for nth in range(ahead, count):
        turns += [(True, nth), (False, nth - ahead)]
    return turns + [(False, nth) for nth in range(count - ahead, count)]
