"""Requests for the stacks of a running job's ranks: written to the attempt's folder, and answered by its supervisor.

A request is an empty file, `attempts/<job>.<n>/stacks/<name>`; the supervisor removes it, and writes `<name>.json`.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.hang import name_ranks
from hpcddp.runs.jsonfile import read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hpcddp.runs.folder import AttemptFolder

_ANSWERED = ".json"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


class RankStacks(Record):
    """The stacks of one rank, as `faulthandler` writes them, or why it has none."""

    rank: int
    host: str
    text: str
    why: str


class StacksAnswer:
    """The answers to a request so far. `awaited`: agent -> host, of those that have not answered."""

    def __init__(self, request: str, awaited: dict[int, str]) -> None:
        self.request, self.awaited = request, awaited
        self.ranks: list[RankStacks] = []


def request_stacks(attempt: AttemptFolder) -> str:
    """Ask the supervisor of this attempt; the request's name. OSError if its folder cannot be written."""
    name = f"{time.time_ns()}-{os.getpid()}"
    folder = _folder(attempt)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "x"):
        return name


def pop_request(attempt: AttemptFolder) -> str:
    """The name of the first request that nobody has taken; "": there is none."""
    with suppress(OSError):
        for name in sorted(os.listdir(_folder(attempt))):
            if not name.startswith(".") and not name.endswith(_ANSWERED):
                os.unlink(os.path.join(_folder(attempt), name))
                return name
    return ""


def write_answer(attempt: AttemptFolder, answer: StacksAnswer) -> None:
    """Write the answer; unanswered ranks are listed with the reason. OSError."""
    silent = [RankStacks(rank, host, "", "its agent does not answer") for rank, host in answer.awaited.items()]
    ranks = [one._asdict() for one in sorted([*answer.ranks, *silent])]
    write_object(_path(attempt, answer.request), {"time": time.time(), "ranks": ranks})


def read_answer(attempt: AttemptFolder, request: str) -> list[RankStacks] | None:
    """Read the answer and remove it; None if there is none yet. DamagedFileError."""
    content = read_object(_path(attempt, request))
    if content is None:
        return None
    with suppress(OSError):
        os.unlink(_path(attempt, request))
    return [RankStacks(**one) for one in content["ranks"]]


def _folder(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "stacks")


def _path(attempt: AttemptFolder, request: str) -> str:
    return os.path.join(_folder(attempt), request + _ANSWERED)


def parse_threads(text: str) -> list[list[dict[str, Any]]]:
    """The stack of each thread, the main thread's first, outermost function first: `file`, `line` and `function`."""
    threads: list[list[dict[str, Any]]] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            threads.insert(0, [])  # Python writes the first thread last
        elif threads and (found := _FRAME.match(line)):
            threads[0].insert(0, found.groupdict() | {"line": int(found["line"])})
    return threads


def group_ranks(ranks: Sequence[RankStacks], *, threads: bool) -> list[dict[str, Any]]:
    """Ranks with the same stacks together, the largest group first; those without stacks last. `threads`: compare all
    threads, not the main thread alone."""
    groups: dict[str, dict[str, Any]] = {}
    for one in ranks:
        stacks = parse_threads(one.text)[: None if threads else 1]
        why = "" if stacks else one.why or "it has written no stack"
        group = groups.setdefault(f"{stacks} {why}", {"ranks": [], "hosts": [], "why": why, "threads": stacks})
        group["ranks"].append(one.rank)
        group["hosts"] += [] if one.host in group["hosts"] else [one.host]
    return sorted(groups.values(), key=lambda group: (group["why"] != "", -len(group["ranks"])))


def format_group(group: dict[str, Any], libraries: Sequence[str]) -> str:
    """Format a group of equal stacks, without Python's own import. `libraries`: folders whose paths are shortened."""
    import linecache

    hosts = ", ".join(group["hosts"][:4]) + (", …" if len(group["hosts"]) > 4 else "")
    lines = [f"{name_ranks(group['ranks'])} on {hosts}{': ' + group['why'] if group['why'] else ''}"]
    for nth, frames in enumerate(group["threads"]):
        lines += [f"  thread {nth}"] if nth else []
        for frame in (one for one in frames if not one["file"].startswith("<frozen importlib")):
            source = linecache.getline(frame["file"], frame["line"]).strip()
            folder = next((one for one in libraries if frame["file"].startswith(one)), "")
            shown = f"  {frame['file'][len(folder) :]}:{frame['line']}, in {frame['function']}"
            lines.append(f"{shown}: {source}" if source else shown)
    return "\n".join(lines) + "\n"
