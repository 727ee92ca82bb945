"""Words such as `{world_size}` in a command, for programs that take the size of a launch as an argument.

`hpcddp exec` puts in this rank's values. The command of a run keeps the placeholders: on other nodes it is the same.
"""

from __future__ import annotations

import re

from hpcddp.errors import RequestError, find_nearest
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What differs from rank to rank, what the launch has, and what the global batch gives.
OF_RANK = ("rank", "local_rank")
OF_LAUNCH = (*OF_RANK, "world_size", "local_world_size", "node_rank", "run_dir")
OF_BATCH = ("global_batch", "per_rank_batch", "micro_batch", "accumulation")
_FORM = re.compile(r"\{([a-z]+(?:_[a-z]+)*)\}")


def find_placeholders(command: Sequence[str]) -> tuple[str, ...]:
    """The names that stand in a command, each once. RequestError for one that nearly is one; others are the program's
    own."""
    found = dict.fromkeys(name for word in command if "{" in word for name in _FORM.findall(word))
    known = (*OF_LAUNCH, *OF_BATCH)
    for name in found:
        near = "" if name in known or "_" not in name else find_nearest(name, list(known))
        if near:
            raise RequestError(f"{{{name}}} in the command is no placeholder", f"{{{near}}}; all: {_shown(known)}")
    return tuple(name for name in found if name in known)


def fill_placeholders(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The command with every placeholder's value. RequestError for one whose value is None or is missing."""

    def value(name: str) -> str:
        if values.get(name) is None:
            told = "the launcher does not say it" if name in OF_LAUNCH else "there is no global batch"
            hint = "leave it out" if name in OF_LAUNCH else "--global-batch B"
            raise RequestError(f"{{{name}}} in the command: {told}", hint)
        return str(values[name])

    names = find_placeholders(command)
    return (
        [_FORM.sub(lambda m: value(m[1]) if m[1] in names else m[0], word) for word in command] if names else [*command]
    )


def batch_numbers(
    command: Sequence[str], world_size: int, global_batch: int | None, max_micro_batch: int | None
) -> dict[str, int]:
    """What the command's placeholders of the batch stand for: global_batch = world_size x per_rank_batch, and
    per_rank_batch = micro_batch x accumulation, with the fewest passes that `max_micro_batch` allows.

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
        raise RequestError(
            f"a global batch of {global_batch} is not the same share for each of {world_size} ranks, and the program"
            f" would not weight them ({_shown(names)} in the command)",
            f"--global-batch {global_batch - rest or world_size} or {global_batch - rest + world_size};"
            " hpcddp.runtime in the script makes uneven shares exact",
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
    """With several passes, a program that is told one of the two numbers would train on another global batch."""
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
