"""Where the ranks stand, and whether they can still meet: the report of a hang, by watchdog and supervisor."""

from __future__ import annotations

import math

from hpcddp.errors import RequestError
from hpcddp.guard.hpcddp_stand import NO_WAIT, WAITS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

DEFAULT_STALL_S = 60.0
DEFAULT_END_S = 600.0
#: Functions of torch.distributed that exchange a message with one other rank.
_MESSAGES = ("recv", "send", "recv_object_list", "send_object_list")
_QUIET = "; it computes, and reads and writes nothing"


class Stand(Record):
    """The place of a rank's main thread: the innermost line of the user's code, and the code that it called there."""

    line: str = ""  # `train.py:41, in evaluate: total = rt.sum(total)`
    inside: str = ""  # what that line is in, the innermost function: `barrier`; empty: nothing
    seconds: float = 0.0  # how long it has stood there; 0: it gets on
    waits: int = NO_WAIT  # NO_WAIT, MAY_WAIT or WAITS: whether it waits for other ranks
    collectives: int = 0  # that it has called in the group of all ranks; 0: not known
    quiet_s: float = 0.0  # how long it has neither waited nor read or written, at any line

    def __str__(self) -> str:
        return f"{self.line} (in {self.inside})" if self.inside else self.line

    @property
    def idle_s(self) -> float:
        """How long it has shown no sign that it gets on."""
        return max(self.seconds, self.quiet_s)

    @property
    def is_message(self) -> bool:
        """Whether it waits for one other rank's message, or for that to take one."""
        return self.waits == WAITS and self.inside in _MESSAGES


class Hang(Record):
    """An error of ranks that cannot meet any more, and the ranks that the others wait for."""

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
    """Seconds without progress after which places are printed, and after which a hang ends the job. None: never."""
    stall_s = read_seconds_or_off(env, "HPCDDP_WATCHDOG", DEFAULT_STALL_S)
    return stall_s, read_seconds_or_off(env, "HPCDDP_WATCHDOG_END", DEFAULT_END_S)


def find_hang(stands: dict[int, Stand], world_size: int, end_s: float) -> Hang | None:
    """Find the ranks that the others wait for. None if a rank gets on or has given no answer, or all stand at one line
    after equally many collectives.

    If all wait for messages, it is all of them: nobody is left to send one, or to take it. The others wait for the
    ranks that do not wait themselves; else for those that have called fewest collectives; else, if they are few, for
    those that wait in another call than most; else it is all of them.
    """
    is_counted = all(stand.collectives for stand in stands.values())
    at = {rank: (str(one), one.collectives if is_counted else 0) for rank, one in stands.items()}
    are_messages = all(stand.is_message for stand in stands.values())
    if len(stands) < world_size or (len(set(at.values())) < 2 and not are_messages):
        return None
    is_waited_for = any(stand.waits != NO_WAIT for stand in stands.values())
    if min(stand.idle_s if is_waited_for else stand.seconds for stand in stands.values()) < end_s:
        return None
    counts = {count for _, count in at.values()}
    lines = [line for line, _ in at.values()]
    sizes = sorted((lines.count(line), line) for line in set(lines))
    busy = [rank for rank, stand in stands.items() if stand.waits == NO_WAIT]
    behind = [rank for rank, (_, count) in at.items() if count == min(counts)]
    fewest = [rank for rank, (line, _) in at.items() if line == sizes[0][1]]
    if len(sizes) > 1 and sizes[0][0] == sizes[1][0]:
        fewest = list(stands)
    found = next((some for some in (busy, behind) if 0 < len(some) < world_size), fewest)
    ranks = sorted(stands if are_messages else found)

    def describe(some: Collection[int]) -> str:
        parts = []
        for line, count in dict.fromkeys(at[rank] for rank in some):
            called = f", after {format_count(count, 'collective')}," if len(counts) > 1 else ""
            parts.append(f"{name_ranks([rank for rank in some if at[rank] == (line, count)])}{called} at {line}")
        return "; ".join(parts)

    others = [rank for rank in stands if rank not in ranks]
    places = f"{describe(ranks)}. The others: {describe(others)}" if others else describe(ranks)
    where = "at different lines" if len(sizes) > 1 else "at one line"
    return Hang(
        ranks,
        f"the ranks have waited for each other for {end_s:g} s, {where}: {places}",
        "let every rank come to the same calls in the same order; HPCDDP_WATCHDOG_END=3600 waits longer, off for ever",
    )


def format_stands(stands: dict[int, Stand], world_size: int, stall_s: float, end_s: float | None = None) -> str:
    """The report: ranks at the same line together, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        moves = "" if stand.seconds else _QUIET if stand.quiet_s >= stall_s else "; it gets on"
        groups.setdefault(f"{stand}{moves}", []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in stands]
    if silent:
        groups["no answer"] = silent
    lines = [f"  {name_ranks(ranks)}  {line}" for line, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))]
    before = f" before {end_s:g} s (HPCDDP_WATCHDOG_END)" if end_s is not None else ""
    lines.append(f"  nothing is ended{before}; a collective that some ranks never call ends at torch's own timeout")
    return "\n".join([f"no progress for {stall_s:g} s. The ranks stand at:", *lines])


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, span)) for span in spans)
