"""`hpcddp env --explain`: every candidate source and number, chosen or rejected, and why.

Shows the values of the variables that rows are made of, and no others: an environment holds secrets.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.candidates import stands
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpcddp.ranks.launch import Launch
    from hpcddp.ranks.resolve import FoundRank


class FoundNumber(Record):
    """One number from one source."""

    launcher: str
    number: str
    value: int | str | None
    source: str
    status: str  # chosen, rejected or undecided
    why: str


class Explanation(Record):
    """All findings, what else was noticed, and the error that the resolution ended in, if it did."""

    findings: list[FoundNumber]
    remarks: tuple[str, ...] = ()
    error: LaunchError | None = None


def explain_launch(launch: Launch) -> Explanation:
    """How `find_rank` and `find_rendezvous` come to their answer. What they raise is in `error`."""
    shell = [*_of_shell(launch.env)]
    try:
        place = launch.place
    except LaunchError as error:
        return Explanation([*_read_all(launch.env), *shell], (), error)
    findings = [*_of_rank(place), *shell]
    if place.info() is None:
        return Explanation(findings)
    try:
        found = launch.rendezvous
    except LaunchError as error:
        return Explanation(findings, (), error)
    for number, value in (("master_addr", found.master_addr), ("master_port", found.master_port)):
        if value is not None:
            findings.append(FoundNumber(place.launcher, number, value, found.source[number], "chosen", ""))
    return Explanation(findings, found.remarks)


def _of_rank(place: FoundRank) -> Iterator[FoundNumber]:
    """The chosen numbers, with what was concluded from them, and those of the other candidates."""
    why = place.candidates[0].why if place.candidates else "a single process"
    told = [(place.launcher, place.numbers, place.source, "chosen", why)]
    told += [(one.row.name, one.numbers, one.source, "rejected", one.why) for one in place.candidates[1:]]
    for name, numbers, source, status, why in told:
        for number in NUMBERS:
            if numbers[number] is not None:
                yield FoundNumber(name, number, numbers[number], source[number], status, why)


def _read_all(env: Mapping[str, str]) -> list[FoundNumber]:
    """What launchers' variables say after an error: of those whose row is there, else of all."""
    found: dict[str, FoundNumber] = {}
    for row in [row for row in LAUNCHERS.values() if stands(row, env)] or LAUNCHERS.values():
        for number in NUMBERS:
            variable = getattr(row, number)
            if variable in env:
                one = FoundNumber(row.name, number, env[variable], variable, "undecided", "see the error")
                found.setdefault(variable, one)
    return list(found.values())


def _of_shell(env: Mapping[str, str]) -> Iterator[FoundNumber]:
    """A launcher's rank variables in a shell, which look like rank 0 of N."""
    for row in LAUNCHERS.values():
        if row.step is not None and row.rank in env and not row.step.is_task(env):
            why = f"not a task of a step ({row.marks[0]} is {env.get(row.marks[0], 'not set')})"
            for number, name in row.step.in_shell:
                if name in env:
                    yield FoundNumber(row.name, number, env[name], name, "rejected", why)


def format_explanation(explanation: Explanation) -> str:
    """As a table for people."""
    rows = [FoundNumber._fields, *(tuple(map(str, finding)) for finding in explanation.findings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"note: {remark}" for remark in explanation.remarks])
