"""Where the ranks stand, for people, and whether they can still meet: what the ranks' own watchdog (training) and the
job's supervisor say of a hang."""

from __future__ import annotations

import math

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.heartbeat import OWN

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_STALL_S = 60.0
DEFAULT_END_S = 600.0


class Stand(Record):
    """Where a rank's main thread is: the innermost line of the user's own code, and the code that it called there."""

    line: str  # `train.py:41, in evaluate: total = rt.sum(total)`
    inside: str  # what that line is in, the innermost function: `barrier`; empty: nothing
    seconds: float  # how long it has stood there; 0: it gets on
    waits: int = OWN  # whether it waits for other ranks, as `runs.heartbeat` has it

    def __str__(self) -> str:
        return f"{self.line} (in {self.inside})" if self.inside else self.line


class Hang(Record):
    """Ranks that all stand, at different lines: those that the others wait for, and what is so in two lines."""

    ranks: list[int]
    message: str
    hint: str

    @property
    def error(self) -> RequestError:
        return RequestError(self.message, self.hint)


def read_seconds_or_off(env: Mapping[str, str], name: str, default_s: float) -> float | None:
    """The variable `name`: seconds, or `off`; None for `off`. RequestError for another text."""
    text = env.get(name, "").strip()
    if not text:
        return default_s
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"{name} is {text!r}, which is no number of seconds above 0", f"{name}={default_s:.0f}, or off"
        )
    return seconds


def read_hang_limits(env: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Seconds without progress after which the ranks' places are printed, and after which a hang ends the job. None:
    never. RequestError for what is no number."""
    stall_s = read_seconds_or_off(env, "HPCDDP_WATCHDOG", DEFAULT_STALL_S)
    return stall_s, read_seconds_or_off(env, "HPCDDP_WATCHDOG_END", DEFAULT_END_S)


def find_hang(stands: dict[int, Stand], world_size: int, end_s: float) -> Hang | None:
    """None if a rank gets on or has given no answer, or all stand at one line."""
    at: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        at.setdefault(str(stand), []).append(rank)
    if len(stands) < world_size or len(at) < 2 or min(stand.seconds for stand in stands.values()) < end_s:
        return None
    own = [rank for rank, stand in stands.items() if stand.waits == OWN]
    ranks = sorted(own) if 0 < len(own) < world_size else min(at.values(), key=len)
    missing = "; ".join(f"{name_ranks(some)} at {line}" for line, some in at.items() if some[0] in ranks)
    others = "; ".join(f"{name_ranks(some)} at {line}" for line, some in at.items() if some[0] not in ranks)
    return Hang(
        ranks,
        f"the ranks have waited for each other for {end_s:g} s, at different lines: {missing}. The others: {others}",
        "let every rank come to the same calls in the same order; HPCDDP_WATCHDOG_END=3600 waits longer, off for ever",
    )


def format_stands(stands: dict[int, Stand], world_size: int, stall_s: float, end_s: float | None = None) -> str:
    """The report: ranks at the same line together, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        moves = "" if stand.seconds else "; it gets on"
        groups.setdefault(f"{stand}{moves}", []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in stands]
    if silent:
        groups["no answer"] = silent
    lines = [f"  {name_ranks(ranks)}  {line}" for line, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))]
    return "\n".join(
        [
            f"no progress for {stall_s:g} s. The ranks stand at:",
            *lines,
            "  nothing is ended"
            + (f" before {end_s:g} s (HPCDDP_WATCHDOG_END)" if end_s is not None else "")
            + "; a collective that some ranks never call ends at torch's own timeout",
        ]
    )


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, span)) for span in spans)
