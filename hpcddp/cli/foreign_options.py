"""What a scheduler's or a launcher's option is called here, by their rows. Loaded only once somebody has typed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.script.fields import read_flag, read_variables
from hpcddp.script.spec import KEYS

# Words of no scheduler or launcher in particular: of sites' guides, trainers and containers. As in the rows, a job
# file's key stands behind --set, and what has blanks is a whole line to type: its numbers are other ones than those of
# the option.
_OTHERS = {
    **dict.fromkeys(("--project", "--group"), "--account"),
    "--time-limit": "--walltime",
    "--num-nodes": "--nodes",
    "--image": "--set container=",
}


def find_equivalent(option: str, value: str) -> str | None:
    """What to type for an option that hpcddp does not have, with its value; None if it means nothing known."""
    key = option.removeprefix("--").replace("-", "_")
    if KEYS.get(key) is read_flag:
        return f"--set {key}=true"
    if KEYS.get(key) is read_variables:
        return f"--set {key}.{value if '=' in value else 'NAME=VALUE'}"
    meanings: dict[str, list[str]] = {}
    for title, typed in each_table():
        if option in typed:
            meanings.setdefault(typed[option], []).append(title)
    if not meanings and option.startswith("--") and key in KEYS:
        meanings = {f"--set {key}=": []}
    if len(meanings) < 2:
        return next((_with_value(meaning, value) for meaning in meanings), None)
    return ", or ".join(f"{_with_value(meaning, value)} ({', '.join(who)})" for meaning, who in meanings.items())


def each_table() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Whose options they are, and what each is called here."""
    for scheduler in scripted_schedulers():
        yield scheduler.title, scheduler.directives.typed
    for launcher in LAUNCHERS.values():
        yield launcher.name, launcher.typed
    yield "others", _OTHERS


def _with_value(meaning: str, value: str) -> str:
    if " " in meaning and not meaning.endswith("="):
        return meaning
    return f"{meaning}{'' if meaning.endswith('=') else ' '}{value or 'VALUE'}"
