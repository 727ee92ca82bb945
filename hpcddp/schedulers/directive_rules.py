"""Which options of one job script its scheduler refuses together, by the tables of its row.

Slurm: every pair of options of sbatch 22.05 was tried. PBS: OpenPBS 23.06, node_manager.c and vnparse.c.
"""

from __future__ import annotations

import re

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcddp.schedulers.row import Directives


class Asked(Record):
    """One option of a directive, under its whole name, and the directive. A resource is an option of its own:
    `-l select`."""

    name: str
    value: str
    text: str


class Clash(Record):
    """Two options that cannot stand in one script, and why. `second` is None where one needs another that is not
    there."""

    first: Asked
    second: Asked | None
    why: str


def read_options(rules: Directives, text: str) -> Iterator[Asked]:
    """The options of one directive, without its prefix: `--mem=4G`, `-l walltime=1:00:00,mem=4gb`, `-n4`."""
    name, _, value = text.partition("=") if text.startswith("--") else text.partition(" ")
    if rules.attached and re.match(r"-[A-Za-z].", name):
        name, value = name[:2], (name[2:] + " " + value).strip()
    name, value = full_name(rules, name), value.strip()
    if name not in rules.listed:
        yield Asked(name, value, text)
        return
    for piece in value.split(","):
        key, _, said = piece.partition("=")
        yield Asked(f"{name} {key}", said, text)


def full_name(rules: Directives, name: str) -> str:
    """The long name of an option, which may be shortened to any beginning that no other option has."""
    if name in rules.long:
        return rules.long[name]
    known = {*rules.long.values(), *rules.options.values(), *rules.printed, *rules.gpus, *rules.no_submit}
    known.update(rules.excludes, *rules.excludes.values())
    longer = {one for one in known if one.startswith(name)} if name.startswith("--") and name not in known else set()
    return longer.pop() if len(longer) == 1 else name


def find_clashes(rules: Directives, options: Sequence[Asked]) -> Iterator[Clash]:
    """Each pair that the scheduler refuses, and each option without the one that it needs."""
    for i, second in enumerate(options):
        for first in options[:i]:
            if second.name in rules.excludes.get(first.name, ()) or first.name in rules.excludes.get(second.name, ()):
                yield Clash(first, second, "takes only one of them")
            elif {_is_typed(rules, first), _is_typed(rules, second)} == {True, False}:
                yield Clash(first, second, "takes GPUs with their type or without it, not both")
    there = {option.name for option in options if option.name not in rules.gpus or _gpus(rules, option)}
    for option in options:
        needed = rules.needs.get(option.name)
        if needed and there.isdisjoint(needed):
            yield Clash(option, None, f"takes it with {' or '.join(needed)} only")


def find_repeats(rules: Directives, options: Sequence[Asked]) -> Iterator[Clash]:
    """Each pair of which only one counts: the same option with two values, and GPUs that are asked for in two ways.
    Those of each rank are a part of the node's."""
    of_job = {*rules.gpus[:-1]}
    for i, second in enumerate(options):
        for first in options[:i]:
            if first.name == second.name and first.value != second.value and first.name not in rules.several:
                yield Clash(first, second, "would read only one of them")
            elif first.name != second.name and all(one.name in of_job and _gpus(rules, one) for one in (first, second)):
                yield Clash(first, second, "would count GPUs by one of them")


def _gpus(rules: Directives, option: Asked) -> str:
    """What an option asks for of GPUs, `a100:4` or `4`; "": nothing."""
    if option.name not in rules.gpus:
        return ""
    if option.name != rules.gpus[0]:
        return option.value
    return next((piece.partition(":")[2] or "1" for piece in option.value.split(",") if re.match(r"gpu\b", piece)), "")


def _is_typed(rules: Directives, option: Asked) -> bool | None:
    """Whether GPUs are asked for with their type; None where none are."""
    gpus = _gpus(rules, option)
    return None if not gpus else not gpus.isdecimal()
