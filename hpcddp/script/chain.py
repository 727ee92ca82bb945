"""Whether an attempt of a chain may go on: by what the attempt before left in the run folder, never by its exit status.

An attempt that is killed says nothing at its end, so the one that follows decides. It goes on only if the ranks wrote
that there is more to do, and came further than where they had begun: the same step twice would be for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Link(NamedTuple):
    """One attempt of a chain: its name, which one it is (from 1), and the run's step when it began."""

    attempt: str
    turn: int
    step: int


class Verdict(NamedTuple):
    """`goes_on`, or why not; `is_failure`: the run is not finished, and nobody will go on with it."""

    goes_on: bool
    reason: str = ""
    is_failure: bool = False


def step_of(state: Mapping[str, Any] | None) -> int:
    """The optimizer step that the run has come to; 0 where no attempt has written one."""
    step = state.get("step") if state else None
    return step if isinstance(step, int) else 0


def judge(state: Mapping[str, Any] | None, before: Link | None) -> Verdict:
    """Whether the next attempt may start. `state`: what state.json holds; no `before`: the first of its chain."""
    if before is None:
        return Verdict(True)
    if state is None or state.get("attempt") != before.attempt:
        return Verdict(False, f"attempt {before.attempt} ended before its first checkpoint", True)
    step, reason = step_of(state), state.get("reason")
    if state.get("status") == "finished":
        return Verdict(False, f"attempt {before.attempt} has finished the run at step {step}")
    if state.get("status") != "continue":
        return Verdict(False, f"attempt {before.attempt} failed at step {step}: {reason}", True)
    if step <= before.step:
        return Verdict(False, f"no progress: attempt {before.attempt} began and ended at step {step}", True)
    return Verdict(True)
