"""The points of a sweep: `{lr: [0.1, 0.01], seed: 1-3}` is six, numbered from 1, the last axis fastest.

Each job of the sweep knows its number only, so the axes give the values again: on the login node, in the job, and where
its run is shown.
"""

from __future__ import annotations

import math
import re
from itertools import islice, pairwise, product

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: name -> its values as they were written
    Axes = Mapping[str, Sequence[str]]

#: More would be a mistake: one run folder each, and more jobs than a scheduler takes in one array.
MOST = 10000
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?::([1-9]\d{0,8}))?", re.ASCII)

#: What differs from rank to rank, what the launch has, and what the global batch gives.
OF_RANK = ("rank", "local_rank")
OF_LAUNCH = (*OF_RANK, "world_size", "local_world_size", "nodes", "node_rank", "run_dir")
OF_BATCH = ("global_batch", "per_rank_batch", "micro_batch", "accumulation")
_KNOWN = (*OF_LAUNCH, *OF_BATCH)
_WITHOUT = {
    **dict.fromkeys(OF_BATCH, ("there is no global batch", "--global-batch B")),
    "run_dir": ("HPCDDP_RUN_DIR is not set", "export HPCDDP_RUN_DIR=runs/train, or use a script of `hpcddp render`"),
}
_FORM = re.compile(r"(?<![{$])\{([a-z]+(?:_[a-z]+)*)\}")  # ${name} is the shell's
_ESCAPED = re.compile(r"(?<![{$])\{\{([a-z_]+)\}\}(?!\})")
_INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh|dash|ksh|zsh)")


def find_placeholders(command: Sequence[str]) -> tuple[str, ...]:
    """The names that stand in a command, each once. Others are the program's own, and so is all of a text for a shell
    or Python behind `-c`."""
    code = find_code(command)
    words = (word for i, word in enumerate(command) if "{" in word and i != code)
    found = dict.fromkeys(name for word in words for name in _FORM.findall(word))
    return tuple(name for name in found if name in _KNOWN)


def fill_placeholders(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The command with every placeholder's value, and `{name}` for `{{name}}`. RequestError for one without a value."""
    names, code = find_placeholders(command), find_code(command)
    for name in names:
        if values.get(name) is None:
            why, hint = _WITHOUT.get(name, ("the launcher does not say it", "leave it out"))
            raise RequestError(f"{{{name}}} in the command: {why}", hint)

    def fill(word: str) -> str:
        filled = _FORM.sub(lambda m: str(values[m[1]]) if m[1] in names else m[0], word)
        return _ESCAPED.sub(lambda m: f"{{{m[1]}}}" if m[1] in _KNOWN else m[0], filled)

    return [word if i == code else fill(word) for i, word in enumerate(command)]


def find_code(command: Sequence[str]) -> int | None:
    """Find a program's text in a command, behind `bash -c` or `python -c`: variables in it may have our names."""
    for i, (before, word) in enumerate(pairwise(command)):
        if _INTERPRETER.fullmatch(before) and re.fullmatch("-[A-Za-z]*c", word):
            return i + 2
    return None


def batch_numbers(
    command: Sequence[str], world_size: int, global_batch: int | None, max_micro_batch: int | None
) -> dict[str, int]:
    """Values of the command's placeholders of the batch: global_batch = world_size x per_rank_batch, and per_rank_batch
    = micro_batch x accumulation, with the fewest passes that `max_micro_batch` allows.

    No framework weights shares of different sizes: RequestError where the division leaves a rest. Counts are samples.
    """
    names = [name for name in find_placeholders(command) if name in OF_BATCH]
    if not names:
        return {}
    if global_batch is None:
        raise RequestError(f"{_shown(names)} in the command, but there is no global batch", "--global-batch B")
    if names == ["global_batch"]:
        return {"global_batch": global_batch}
    share, rest = divmod(global_batch, world_size)
    if rest:
        near = " or ".join(str(n) for n in (global_batch - rest, global_batch - rest + world_size) if n)
        raise RequestError(
            f"a global batch of {global_batch} is not the same share for each of {world_size} ranks, and the program"
            f" would not weight them ({_shown(names)} in the command)",
            f"--global-batch {near}; hpcddp.runtime in the script makes uneven shares exact",
        )
    passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= (max_micro_batch or share))
    _refuse_half(names, share, passes)
    return {
        "global_batch": global_batch,
        "per_rank_batch": share,
        "micro_batch": share // passes,
        "accumulation": passes,
    }


def _refuse_half(names: Sequence[str], share: int, passes: int) -> None:
    """Refuse one of the two numbers without the other: with several passes, the global batch would be another one."""
    if passes > 1 and ("per_rank_batch" in names or ("micro_batch" in names and "accumulation" not in names)):
        what = f"a rank takes its share of {share} in {passes} passes, and the command has {_shown(names)}"
        raise RequestError(what, "{micro_batch} and {accumulation} in the command, and no {per_rank_batch}")


def _shown(names: Sequence[str]) -> str:
    return " ".join(f"{{{name}}}" for name in names)


def read_axes(value: object, where: str) -> dict[str, tuple[str, ...]]:
    """Axes as a job file gives them: each name with a list of values, or a range `1-3` or `0-100:25`, both ends
    included. RequestError for anything else, and for more than MOST points."""
    if not isinstance(value, dict) or not value:
        hint = "--set sweep.lr=0.1,0.01" if where.startswith("--set") else "sweep: {lr: [0.1, 0.01], seed: 1-3}"
        raise RequestError(f"{where} is not a mapping of names to values", hint)
    axes = {str(name): _read_values(str(name), values, where) for name, values in value.items()}
    points = count_points(axes)
    if points > MOST:
        what = f"{where} has {points} points, and a sweep may have {MOST}"
        raise RequestError(what, "fewer values, or several sweeps")
    return axes


def count_points(axes: Axes) -> int:
    """How many there are."""
    return math.prod(map(len, axes.values()))


def find_point(axes: Axes, number: int) -> dict[str, str]:
    """The values of one point, from 1. RequestError if there is none of that number."""
    if not 1 <= number <= count_points(axes):
        what = f"index {number} is no point of this sweep, which has {count_points(axes)}"
        raise RequestError(what, "submit the sweep with hpcddp submit, which makes its array")
    values = next(islice(product(*axes.values()), number - 1, None))
    return dict(zip(axes, values, strict=True))


def format_point(point: Mapping[str, str]) -> str:
    """`lr=0.1 seed=2`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def fill_point(command: Sequence[str], point: Mapping[str, str]) -> list[str]:
    """The command with the point's values for its `{name}`; those behind `bash -c` are the shell's own."""
    code = find_code(command)
    names = "|".join(map(re.escape, point))
    form = re.compile(rf"(?<![{{$])\{{({names})\}}")
    return [word if i == code else form.sub(lambda m: point[m[1]], word) for i, word in enumerate(command)]


def check_axes(axes: Axes, command: Sequence[str], keys: Sequence[str]) -> None:
    """RequestError for a name that is neither in the command nor one of `keys`, those of the job file."""
    for name in (name for name in axes if name not in keys):
        if name in {*OF_LAUNCH, *OF_BATCH}:
            raise RequestError(f"sweep: {{{name}}} is the launch's own number", f"another name than {name}")
        if fill_point(command, {name: ""}) == list(command):
            what = f"sweep: {name} is no key of a job file, and {{{name}}} does not stand in the command"
            raise RequestError(what, f"--{name.replace('_', '-')} {{{name}}} in the command")


def _read_values(name: str, values: object, where: str) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{where}: {name!r} is no name", "letters, digits and _ . -")
    listed = _read_list(values) if isinstance(values, str) else values
    is_plain = isinstance(listed, list) and all(isinstance(one, str) and one and one.isprintable() for one in listed)
    if not isinstance(listed, list) or not is_plain or not listed or len(set(listed)) < len(listed):
        hint = f"{name}: [0.1, 0.01], or {name}: 1-3"
        raise RequestError(f"{where}: {name} is not a list of values, each once", hint)
    return tuple(listed)


def _read_list(text: str) -> list[str]:
    """Values with commas between them, or the numbers of a range; of one that is too long the first ones."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        return text.split(",")
    return [str(number) for number in range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))[: MOST + 1]]
