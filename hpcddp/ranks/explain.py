"""`hpcddp env --explain`: every candidate source and number, chosen or rejected, and why.

Shows the values of the variables that rows are made of, and no others: an environment holds secrets.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.candidates import stands
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    remarks: tuple[str, ...]
    error: LaunchError | None


def explain_rank(
    env: Mapping[str, str], *, hostname: str | None = None, nodefile: str | None = None, live: bool = False
) -> Explanation:
    """How `resolve` and `find_rendezvous` come to their answer. Raises nothing that they raise: that is in `error`."""
    launch = Launch(env, hostname, nodefile, live=live, strict=False)
    try:
        place = launch.place
    except LaunchError as error:
        return Explanation([*_read_all(env), *_of_shell(env)], (), error)
    findings = _of_rank(place) + _of_shell(env)
    if place.info() is None:
        return Explanation(findings, (), None)
    try:
        rendezvous = launch.rendezvous
    except LaunchError as error:
        return Explanation(findings, (), error)
    for number, value in (("master_addr", rendezvous.master_addr), ("master_port", rendezvous.master_port)):
        if value is not None:
            findings.append(FoundNumber(place.launcher, number, value, rendezvous.source[number], "chosen", ""))
    return Explanation(findings, rendezvous.remarks, None)


def _of_rank(place: FoundRank) -> list[FoundNumber]:
    findings = []
    for one in place.judged:
        numbers, source = one.candidate.numbers, one.candidate.source
        if one.chosen:  # with what was concluded from it
            numbers, source = place.numbers, place.source
        word = "chosen" if one.chosen else "rejected"
        for number in NUMBERS:
            if numbers[number] is not None:
                name = one.candidate.row.name
                findings.append(FoundNumber(name, number, numbers[number], source[number], word, one.why))
    if not place.judged:
        findings = [
            FoundNumber("none", number, place.numbers[number], place.source[number], "chosen", "a single process")
            for number in NUMBERS
        ]
    return findings


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


def _of_shell(env: Mapping[str, str]) -> list[FoundNumber]:
    """A launcher's rank variables in a shell, which look like rank 0 of N."""
    findings = []
    for row in LAUNCHERS.values():
        if row.step is not None and row.rank in env and not row.step.is_task(env):
            why = f"not a task of a step ({row.marks[0]} is {env.get(row.marks[0], 'not set')})"
            findings += [FoundNumber(row.name, k, env[v], v, "rejected", why) for k, v in row.step.in_shell if v in env]
    return findings


def format_explanation(explanation: Explanation) -> str:
    """As a table for people."""
    rows = [FoundNumber._fields, *(tuple(map(str, finding)) for finding in explanation.findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(FoundNumber._fields))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"note: {remark}" for remark in explanation.remarks])
