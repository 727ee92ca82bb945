"""The launcher's command line for other hosts than the script's: the same line, with those hosts named in it."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_line import IfSet, LaunchRequest, launch_arguments
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from hpcddp.ranks.launch_line import Words

_LISTS = ("exported", "exported_always", "exported_if_set", "launcher_options")


def read_request(told: Mapping[str, Any]) -> LaunchRequest:
    """What the job script's order says of a launcher's line."""
    fields: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in told.items()}
    return LaunchRequest(**fields)


def rewrite_line(
    words: list[str], launcher: str, told: Mapping[str, Any], hosts: tuple[str, ...], env: Mapping[str, str]
) -> list[str]:
    """`words` of the script, which start ranks on all its nodes, for these hosts. Empty `hosts`: on one machine.

    RequestError if the words are not those that were rendered.
    """
    if not told or not hosts:
        return words
    row, before = LAUNCHERS[launcher], read_request(told)
    assert row.line is not None
    length = _count_words(row.line(before), env)
    rest = words[length:]
    if not rest:
        raise RequestError("the launcher's line was changed after it was rendered", "render the script again")
    now = before._replace(nodes=len(hosts), hosts=hosts, program=words[0])
    return [*launch_arguments(row.line(now), env), *_renumber(rest, before.nodes, len(hosts))]


def _renumber(rest: list[str], before: int, now: int) -> list[str]:
    """What follows the launcher: an agent's or exec's own number of nodes, up to the ranks' command."""
    end = next((at for at, word in enumerate(rest) if word == "--"), 0)
    changed = [f"--nnodes={now}" if word == f"--nnodes={before}" else word for word in rest[:end]]
    for at, word in enumerate(changed[:-1]):
        if word == "--nodes":
            changed[at + 1] = str(now)
    return [*changed, *rest[end:]]


def _count_words(groups: Iterable[Words], env: Mapping[str, str]) -> int:
    """How many words the shell has made of these."""
    words = [word for group in groups for word in group]
    return sum(len(word.words) * bool(env.get(word.variable)) if isinstance(word, IfSet) else 1 for word in words)
