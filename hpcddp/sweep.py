"""The points of a sweep: `{lr: [0.1, 0.01], seed: 1-3}` is six, numbered from 1, the last axis fastest.

Each job of the sweep knows its number only, so the axes give the values again: on the login node, in the job, and where
its run is shown.
"""

from __future__ import annotations

import re

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# Words such as `{world_size}` in a command, for programs that take the size of a launch as an argument.


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
_INTERPRETER = re.compile(r"(.*/)?(python[\d.]*|bash|sh|dash|ksh|zsh)")
# Options of theirs that are followed by a word of their own.
_PYTHONS = "-[A-Za-z]*[WX]"
_SHELLS = r"[-+][A-Za-z]*[oO]|--rcfile|--init-file"


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
            told, hint = _WITHOUT.get(name, ("the launcher does not say it", "leave it out"))
            raise RequestError(f"{{{name}}} in the command: {told}", hint)

    def fill(word: str) -> str:
        filled = _FORM.sub(lambda m: str(values[m[1]]) if m[1] in names else m[0], word)
        return _ESCAPED.sub(lambda m: f"{{{m[1]}}}" if m[1] in _KNOWN else m[0], filled)

    return [word if i == code else fill(word) for i, word in enumerate(command)]


def find_code(command: Sequence[str]) -> int | None:
    """Find a program's text in a command, behind `bash -c` or `python -c`: variables in it may have our names."""
    interpreter, is_value = None, False
    for i, word in enumerate(command):
        if interpreter is None:
            interpreter = _INTERPRETER.fullmatch(word)
        elif is_value:
            is_value = False
        elif re.fullmatch("-[A-Za-z]*c", word):
            return i + 1
        elif not word.startswith(("-", "+")):
            return None
        else:
            with_value = _PYTHONS if interpreter[2].startswith("python") else _SHELLS
            is_value = re.fullmatch(with_value, word) is not None
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
    if passes == 1:
        return
    if "micro_batch" in names and "accumulation" not in names:
        what = f"the command takes {{micro_batch}}, but not {{accumulation}}, which is {passes}"
        raise RequestError(what, "hand it the number of accumulation steps too: {accumulation}")
    if "accumulation" in names and "per_rank_batch" in names:
        what = f"{{per_rank_batch}}, {share}, is a share of a whole step: in {passes} passes it would count {passes}x"
        raise RequestError(what, "{micro_batch} beside {accumulation}")
    if "per_rank_batch" in names and "micro_batch" not in names:
        what = f"a share of {share} is more than max_micro_batch allows in one pass"
        raise RequestError(what, "{micro_batch} and {accumulation} in the command instead of {per_rank_batch}")


def _shown(names: Sequence[str]) -> str:
    return " ".join(f"{{{name}}}" for name in names)


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: name -> its values as they were written
    Axes = Mapping[str, Sequence[str]]

#: More would be a mistake: one run folder each, and more jobs than a scheduler takes in one array.
MOST = 10000
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?::([1-9]\d{0,8}))?", re.ASCII)


def read_axes(value: object, where: str) -> dict[str, tuple[str, ...]]:
    """Axes as a job file gives them: each name with a list of values, or a range `1-3` or `0-100:25`, both ends
    included. RequestError for anything else, and for more than MOST points."""
    if not isinstance(value, dict) or not value:
        hint = "--set sweep.lr=0.1,0.01" if where.startswith("--set") else "sweep: {lr: [0.1, 0.01], seed: 1-3}"
        raise RequestError(f"{where} is not a mapping of names to values", hint)
    axes = {str(name): _read_values(str(name), values, where) for name, values in value.items()}
    points = count_points(axes)
    if points > MOST:
        raise RequestError(
            f"{where} has {points} points, and a sweep may have {MOST}", "fewer values, or several sweeps"
        )
    return axes


def count_points(axes: Axes) -> int:
    """How many there are."""
    points = 1
    for values in axes.values():
        points *= len(values)
    return points


def find_point(axes: Axes, number: int) -> dict[str, str]:
    """The values of one point, from 1. RequestError if there is none of that number."""
    if not 1 <= number <= count_points(axes):
        raise RequestError(
            f"index {number} is no point of this sweep, which has {count_points(axes)}",
            "submit the sweep with hpcddp submit, which makes its array",
        )
    left, point = number - 1, dict[str, str]()
    for name, values in list(axes.items())[::-1]:
        left, at = divmod(left, len(values))
        point[name] = values[at]
    return {name: point[name] for name in axes}


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
    code = find_code(command)
    words = [word for i, word in enumerate(command) if i != code]
    for name in axes:
        if name in keys:
            continue
        if name in {*OF_LAUNCH, *OF_BATCH}:
            raise RequestError(f"sweep: {{{name}}} is the launch's own number", f"another name than {name}")
        if not any(re.search(rf"(?<![{{$])\{{{re.escape(name)}\}}", word) for word in words):
            behind = " (what stands behind -c is the shell's own)" if code is not None else ""
            raise RequestError(
                f"sweep: {name} is no key of a job file, and {{{name}}} does not stand in the command{behind}",
                f"--{name.replace('_', '-')} {{{name}}} in the command",
            )


def _read_values(name: str, values: object, where: str) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{where}: {name!r} is no name", "letters, digits and _ . -")
    if isinstance(values, str):
        found = _RANGE.fullmatch(values.strip())
        if (found is not None and int(found[1]) > int(found[2])) or re.fullmatch(r"\s*\d+-\d+:0+\s*", values):
            raise RequestError(f"{where}: {name}={values.strip()} is a range without a number in it", f"{name}: 1-3")
        if found is not None and int(found[1]) <= int(found[2]):
            numbers = range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))
            if len(numbers) > MOST:
                raise RequestError(f"{where}: {name} has {len(numbers)} values", f"{MOST} at most")
            return tuple(map(str, numbers))
        values = values.split(",") if values else []
    if not isinstance(values, list) or not values:
        raise RequestError(f"{where}: {name} has no list of values", f"{name}: [0.1, 0.01], or {name}: 1-3")
    for value in values:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise RequestError(f"{where}: {name} has {value!r}, which is no plain value", f"{name}: [0.1, 0.01]")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise RequestError(f"{where}: {name} has {twice} twice", "each value once")
    return tuple(values)
