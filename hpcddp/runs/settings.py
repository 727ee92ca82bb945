"""`settings.json` of a run: what it was trained with is recorded, and each later start is compared with that.

Settings are values by name, grouped: `run`, `script` (files of the command), and each object of the training by its
name in checkpoints. Where a value is accepted, the settings before stay there, for earlier checkpoints.
"""

from __future__ import annotations

import os
import re
import sys

from hpcddp.errors import RequestError, nearest
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import COMMAND, SEPARATOR, AttemptFolder, RunFolder, cannot_write, job_of, show_path
from hpcddp.runs.jsonfile import format_now, read_record, write_object
from hpcddp.runs.start import is_interactive
from hpcddp.units import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Settings = Mapping[str, Mapping[str, Any]]  # group -> name -> a value of JSON

#: Variables in which the job says which settings are accepted, and which are kept: names with commas between them.
ACCEPT, KEEP = "HPCDDP_ACCEPT", "HPCDDP_KEEP"
RUN_GROUP, SCRIPT_GROUP = "run", "script"
_LARGEST = 1 << 20  # bytes of a file whose content is compared
_PROGRAM = b"\x7fELF"  # an interpreter, a compiled program: what such a file begins with
_LEAST_NAME = 3  # characters of a job's id that is looked for in words: a shorter one may be any number
_PARAMETERS = "parameters"  # an optimizer's state is restored by position: other parameters would get it
_OF_RUN = ("command", "owner", "script", "seed", "global_batch", "samples", "shuffle", "exact")
_KEEPABLE = {"seed", "global_batch"}  # of the run: the others are what they are


class Recorded(Record):
    """The file. `before`: settings that were replaced, each with the last `step` that they hold for, and when, `at`."""

    settings: dict[str, dict[str, Any]]
    before: tuple[dict[str, Any], ...] = ()


class SettingDifference(Record):
    """One setting. `name`: empty where only one of the two has the whole object; then the values are its class."""

    group: str
    name: str
    old: Any
    new: Any

    @property
    def names(self) -> set[str]:
        """Its names in `--accept` and `--keep`: a group's name means all of its settings."""
        return {self.group, self.group.partition("[")[0], self.name, self.path} - {"", RUN_GROUP}

    @property
    def path(self) -> str:
        return self.name if self.group == RUN_GROUP else f"{self.group}.{self.name}" if self.name else self.group

    @property
    def word(self) -> str:
        """The shortest of its names, for a hint."""
        return self.group if self.group == SCRIPT_GROUP or not self.name else self.name

    @property
    def can_be_accepted(self) -> bool:
        """Whether it can be accepted: not other parameters of a model or an optimizer, nor another number of groups."""
        return self.name != _PARAMETERS and not (self.name == "" and "[" in self.group)

    @property
    def is_keepable(self) -> bool:
        """Whether a start can go on with the recorded value."""
        if self.group in {RUN_GROUP, SCRIPT_GROUP}:
            return self.name in _KEEPABLE
        return self.can_be_accepted and self.name not in {"", "class"}

    def __str__(self) -> str:
        if self.group == SCRIPT_GROUP:
            return f"{self.name} has changed"
        old, new = self.old, self.new
        if isinstance(old, list) and isinstance(new, list) and self.name in {"command", _PARAMETERS}:
            old, new = _cut_common(old, new)
        return f"{self.path}: {_show(old)} -> {_show(new)}"


class Hints(Record):
    """What to type to accept or keep settings, and (`anew`) to begin a new run: options of a verb, or the script's."""

    option: str
    anew: str


OF_VERB = Hints("--{} {}", "--fresh, or another name")
OF_SCRIPT = Hints('hpcddp.runtime(…, {}="{}")', "another run_dir")


class Decision(Record):
    """New values that are accepted, and settings whose recorded values are kept. `changed`: files that nobody named."""

    accepted: tuple[SettingDifference, ...] = ()
    kept: tuple[SettingDifference, ...] = ()
    changed: tuple[SettingDifference, ...] = ()


def read_list(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in env.get(name, "").split(","))))


def read_recorded(run: RunFolder) -> Recorded | None:
    """Read the recorded settings of a run; None if there is no such file. SchemaError; DamagedFileError."""
    return read_record(run.settings, Recorded)


def write_settings(run: RunFolder, recorded: Recorded) -> None:
    """LaunchError if it cannot be written."""
    try:
        write_object(run.settings, recorded._asdict(), durable=True)
    except OSError as error:
        raise cannot_write(run, error) from error


def compare_settings(recorded: Settings, now: Settings) -> list[SettingDifference]:
    """List values that differ, and objects that only one of the two has. A single name that only one has is no
    difference."""
    found = []
    for group in {**recorded, **now}:
        if group not in recorded or group not in now:
            classes = [
                settings[group].get("class", "there") if group in settings else None for settings in (recorded, now)
            ]
            found += [SettingDifference(group, "", *classes)] if group not in {RUN_GROUP, SCRIPT_GROUP} else []
            continue
        old, new = recorded[group], now[group]
        names = (name for name in old if name in new and old[name] != new[name] and repr(old[name]) != repr(new[name]))
        found += [SettingDifference(group, name, old[name], new[name]) for name in names]
    return found


def decide(
    run: RunFolder,
    differences: Sequence[SettingDifference],
    accept: Sequence[str],
    keep: Sequence[str] | None,
    *,
    hints: Hints,
) -> Decision:
    """RequestError, which lists them, if neither `accept` nor `keep` names a difference. Files may change: see
    `check_unchanged`. `keep` None: nothing can be kept."""
    keepable = [one for one in differences if one.is_keepable and keep is not None]
    accepted = [one for one in differences if one.can_be_accepted and not one.names.isdisjoint(accept)]
    kept = [one for one in keepable if not one.names.isdisjoint(keep or ()) and one not in accepted]
    changed = [one for one in differences if one.group == SCRIPT_GROUP and one not in accepted]
    accepted += changed
    left = [one for one in differences if one not in accepted and one not in kept]
    if left:
        ways = []
        for word, given, names, does in (
            ("accept", accept, [one.word for one in left if one.can_be_accepted], "takes the new"),
            ("keep", keep or (), [one.word for one in left if one in keepable], "the recorded"),
        ):
            if names:  # with what is given already, which what is typed replaces
                ways.append(f"{hints.option.format(word, ','.join(dict.fromkeys((*given, *names))))} {does}")
        if not all(one.can_be_accepted for one in left):
            ways.append("keep the parameters and their order as they were")
        raise RequestError(
            f"run {show_path(run.path)} was recorded with other settings: {'; '.join(map(str, left))}",
            "; ".join((*ways, f"a run of its own: {hints.anew}")),
        )
    return Decision(tuple(accepted), tuple(kept), tuple(changed))


def check_unchanged(run: RunFolder, decision: Decision, hints: Hints) -> None:
    """RequestError for files that have changed since the run finished, and that nobody has accepted."""
    if decision.changed:
        raise RequestError(
            f"run {show_path(run.path)} is finished, and {' and '.join(map(str, decision.changed))} since",
            f"{hints.option.format('accept', 'script')} takes its weights all the same; to begin anew: {hints.anew}",
        )


def check_names(names: Sequence[str], settings: Iterable[Settings], option: str) -> None:
    """RequestError for a name that none of these settings has. `option`: where it was given."""
    pairs = [(group, name) for one in settings for group, values in one.items() for name in ("", *values)]
    known = {*_OF_RUN, *(called for pair in pairs for called in SettingDifference(*pair, None, None).names)}
    for name in names:
        if known.isdisjoint((name, re.sub(r"_\d+$", "", name))):  # samples_2: of a loader that comes later
            short = sorted(one for one in known if "." not in one)
            raise RequestError(
                f"{option.format(name)}: the run has no such setting{nearest(name, short)}",
                f"one of: {', '.join(short)}",
            )


def renew(recorded: Recorded | None, now: Settings, decision: Decision, step: int) -> Recorded:
    """The record of a run that goes on from this step: with the values of now, but for those that are kept."""
    settings = {group: dict(values) for group, values in now.items()}
    if recorded is None:
        return Recorded(settings)
    for one in decision.kept:
        settings[one.group][one.name] = one.old
    for group in (RUN_GROUP, SCRIPT_GROUP):  # what this start does not know stays, such as its words in a notebook
        settings[group] = {**recorded.settings.get(group, {}), **settings.get(group, {})}
    if all(one.group == SCRIPT_GROUP for one in decision.accepted):  # which no checkpoint has
        return Recorded(settings, recorded.before)
    replaced = {"step": step, "settings": recorded.settings, "at": format_now()}
    return Recorded(settings, (*recorded.before, replaced))


def settings_at(recorded: Recorded, step: int) -> dict[str, dict[str, Any]]:
    found = next((one["settings"] for one in recorded.before if step <= one["step"]), recorded.settings)
    return {group: dict(values) for group, values in found.items()}


def find_command(env: Mapping[str, str]) -> tuple[str, ...]:
    """The words typed behind `--`, before placeholders were filled; else this process's own; () in a notebook."""
    if is_interactive():
        return ()
    words = env.get(COMMAND)
    return identify_command(words.split(SEPARATOR) if words else sys.orig_argv)


def describe_start(attempt: AttemptFolder, main: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Describe a start: its owner, its command without the job's id, and SHA-256 sums of its files. `main`: this
    process's script. In a notebook neither words nor files are known."""
    from hpcddp.schedulers.run import name_user

    owner: dict[str, Any] = {"owner": name_user(os.getuid())}
    if is_interactive():
        return {RUN_GROUP: owner, SCRIPT_GROUP: {}}
    names = {attempt.name, job_of(attempt.name), attempt.run.path}
    known = "|".join(re.escape(one) for one in sorted(names, key=len, reverse=True) if len(one) >= _LEAST_NAME)
    command = [re.sub(rf"(?<!\w)(?:{known})(?!\w)", "…", word) for word in find_command(env)]
    words = (*filter(None, env.get(COMMAND, "").split(SEPARATOR)), *sys.orig_argv[1:])
    return {RUN_GROUP: {**owner, "command": command}, SCRIPT_GROUP: _hash_files(attempt.run, words, main)}


def _hash_files(run: RunFolder, words: Sequence[str], main: str | None) -> dict[str, str]:
    """SHA-256 of the files among these words, also as values (`--config=a.yaml`)."""
    import hashlib

    found: dict[str, str] = {}
    inside = os.path.realpath(run.path) + os.sep
    named = [part for word in words for part in (word, word.partition("=")[2]) if part]
    if main and os.path.realpath(main) not in map(os.path.realpath, named):
        named.append(main)
    for name in named:
        try:
            if os.path.isfile(name) and os.path.getsize(name) <= _LARGEST:
                with open(name, "rb") as file:
                    content = file.read()
                if not (content.startswith(_PROGRAM) or os.path.realpath(name).startswith(inside)):
                    called = os.path.basename(name) if name == main else os.path.normpath(name)
                    found[called] = hashlib.sha256(content).hexdigest()
        except (OSError, ValueError):  # no file of ours to read, or no name that a file can have
            continue
    return found


def _cut_common(old: list[Any], new: list[Any]) -> tuple[Any, Any]:
    least = min(len(old), len(new))
    first = next((n for n in range(least) if old[n] != new[n]), least)
    last = next((n for n in range(least - first) if old[-1 - n] != new[-1 - n]), least - first)
    ends = (" ".join(map(str, one[first : len(one) - last])) for one in (old, new))
    return tuple(ends)  # type: ignore[return-value]  # two of them


def _show(value: Any) -> str:
    return "none" if value is None or value == "" else shorten(str(value))
