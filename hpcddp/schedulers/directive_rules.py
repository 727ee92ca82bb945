"""The options of a script's directives, and which of them cannot stand together, by the tables of a scheduler's row."""

from __future__ import annotations

import re

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcddp.schedulers.row import Directives


class DirectiveOption(Record):
    """An option of a directive, under its whole name, and the directive. A resource is an option of its own:
    `-l select`."""

    name: str
    value: str
    text: str


class Clash(Record):
    """Options that cannot stand in one script: two, or one without another that it `needs`; and what the scheduler does
    with them."""

    options: tuple[DirectiveOption, ...]
    why: str
    needs: tuple[str, ...] = ()
    is_refused: bool = False


def parse_directive(rules: Directives, text: str) -> Iterator[DirectiveOption]:
    """The options of one directive, without its prefix: `--mem=4G`, `-l walltime=1:00:00,mem=4gb`, `-n4`."""
    name, _, value = text.partition("=") if text.startswith("--") else text.partition(" ")
    if rules.attached and re.match(r"-[A-Za-z].", name):
        name, value = name[:2], f"{name[2:]} {value}"
    name, value = full_name(rules, name), value.strip()
    if name not in rules.listed:
        yield DirectiveOption(name, value, text)
        return
    for piece in value.split(","):
        key, _, setting = piece.partition("=")
        yield DirectiveOption(f"{name} {key}", setting, text)


def full_name(rules: Directives, name: str) -> str:
    """The long name of an option, which may be shortened to any beginning that no other option has."""
    if name[1:] in rules.letters:
        return f"--{rules.letters[name[1:]]}"
    known = {*rules.options.values(), *rules.printed, *rules.no_submit, *rules.gpu_counts, *rules.synonyms}
    known.update(*rules.alternatives, *rules.last_wins, (one.partition("=")[0] for one in rules.needs))
    known.update(f"--{name}" for name in rules.letters.values())
    longer = {one for one in known if one.startswith(name)} if name.startswith("--") and name not in known else set()
    found = longer.pop() if len(longer) == 1 else name
    return rules.synonyms.get(found, found)


def find_clashes(rules: Directives, options: Sequence[DirectiveOption]) -> Iterator[Clash]:
    """Find what the scheduler refuses; then what it would read one of: an option with two values, and GPUs that are
    requested in two ways."""
    for i, j, why in refused_together(rules, [(option.name, option.value) for option in options]):
        yield Clash((options[i], options[j]), f"refuses options that {why}", is_refused=True)
    there = {option.name for option in options if option.name not in rules.gpu_counts or _counts_gpus(rules, option)}
    for option in options:
        needed = rules.needs.get(option.name) or rules.needs.get(f"{option.name}={option.value}")
        if needed and there.isdisjoint(needed):
            yield Clash((option,), f"takes it with {' or '.join(needed)} only", needed, True)
    for i, second in enumerate(options):
        for first in options[:i]:
            is_same = first.name == second.name and first.name not in rules.several
            group = any(first.name in group and second.name in group for group in rules.last_wins)
            if first.value != second.value if is_same else group and first.name != second.name:
                yield Clash((first, second), "would read only one of them")
            elif first.name != second.name and all(
                one.name in rules.one_of and _counts_gpus(rules, one) for one in (first, second)
            ):
                yield Clash((first, second), "would count GPUs by one of them")


def refused_together(rules: Directives, options: Sequence[tuple[str, str]]) -> list[tuple[int, int, str]]:
    """The pairs of a job's options, (long name, value) each, that the submit command refuses: their places, and why."""
    found = []
    for second, (name, value) in enumerate(options):
        typed = _gpu_types(rules, name, value)
        for first, (other, other_value) in enumerate(options[: second + 1]):
            if other != name and any(name in group and other in group for group in rules.alternatives):
                found.append((first, second, "exclude each other"))
            elif len(typed | _gpu_types(rules, other, other_value)) > 1 and (other != name or first == second):
                found.append((first, second, "ask for GPUs with a type and without one"))
    return found


def _gpu_types(rules: Directives, name: str, value: str) -> set[bool]:
    """Whether the counts of GPUs in an option's value name a type: `gpu:a100:4`; `gpu:4,tmpfs:1G`."""
    before = rules.gpu_counts.get(name)
    words = [word for word in f"{value},".split(",") if word] if before is not None else []
    counts = [word[len(before or "") :] for word in words if f"{word}:".startswith(before or "")]
    return {count != "" and not count[0].isdigit() for count in counts}


def _counts_gpus(rules: Directives, option: DirectiveOption) -> bool:
    before = rules.gpu_counts.get(option.name, "")
    return any(f"{piece}:".startswith(before) for piece in option.value.split(","))
