"""Reads a script's directives as its scheduler does, each by its own rules.

PBS: OpenPBS `src/cmds/qsub_sup.c` (get_script), `src/cmds/qsub.c` (make_argv); checked against what a real OpenPBS
23.06 accepted, refused and recorded (tests/captures/pbs/directives.json). Slurm: `src/sbatch/opt.c`
(_opt_batch_script, _get_argument); checked against a real sbatch 22.05, which also parses #PBS lines unless `#SBATCH
--ignore-pbs` stands there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from hpcddp.schedulers.directive_rules import full_name
from hpcddp.schedulers.registry import find_scheduler

Tokens = tuple[str, ...]
UNIX_LINES = r"line ends of Unix: sed -i 's/\r$//' FILE"


class Option(NamedTuple):
    """One option, with the line it stands on (from 1). A resource is an option of its own: `-l select`."""

    name: str
    value: str
    line: int

    @property
    def text(self) -> str:
        """The option as a message shows it: `-p 5000`, `-l mem=4gb`; a value that is hard to see in quotes."""
        plain = self.value and " " not in self.value and not self.value.endswith(":")
        return f"{self.name}{'=' if ' ' in self.name else ' '}{self.value if plain else repr(self.value)}"


class Refusal(NamedTuple):
    """Why the scheduler refuses the whole script, at which line, and what to write."""

    line: int
    why: str
    instead: str = "one option per line, no comment behind it"


class ScriptDirectives(NamedTuple):
    """A script's directives, as one scheduler reads them; `unread`: lines that look like directives and are none to it.

    `torque`: a script for Torque's qsub, whose values are not PBS's. The options are those of a job's first component.
    """

    scheduler: str
    options: tuple[Option, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    unread: tuple[int, ...] = ()
    command_line: int = 0
    torque: bool = False

    def all(self, *names: str) -> list[Option]:
        """Every option of these names, in the order of the script."""
        return [o for o in self.options if o.name in names]

    def get(self, *names: str) -> Option | None:
        """The one that counts: PBS keeps the first of two resources; else the last wins, on every scheduler."""
        found = self.all(*names)
        if not found:
            return None
        return found[0] if self.scheduler == "pbs" and found[0].name.startswith("-l ") else found[-1]


class UnmatchedError(ValueError):
    """A quote that opens and does not close."""


class ListError(ValueError):
    """The value of an option is a list, and is not written like one."""


def numbered(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers. Only a line feed ends a line here: schedulers know no other end."""
    return list(enumerate(text.split("\n"), 1))


def split_short_options(words: Tokens, takes_value: Callable[[str], bool | None]) -> Iterator[tuple[str, str | None]]:
    """getopt over short options: (`-N`, value), (`-V`, ""), ("?", word) for a stray one, (`-Z`, None) for an unknown.

    `takes_value` says it for a letter, None for a letter that is no option. Raises UnmatchedError for a missing value.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from (("?", left) for left in rest or [word])
            return
        if not word.startswith("-") or word == "-":
            yield "?", word
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            takes = takes_value(letter)
            if takes is None:
                yield f"-{letter}", None
            elif not takes:
                yield f"-{letter}", ""
            else:
                if not letters and not rest:
                    raise UnmatchedError(f"-{letter} without a value")
                yield f"-{letter}", letters or rest.pop(0)
                letters = ""


# ---- PBS

ON_TORQUE = "on Torque: hpcddp lint --site generic-torque"
# GETOPT_ARGS of qsub: a letter, with a colon if it takes a value
_LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"
_TORQUE = "t:d:D:w:F:n"  # Torque's own
_INSTEAD = {"-t": "#PBS -J FIRST-LAST", "-d": "cd FOLDER below", "-w": "cd FOLDER below", "--": "-l walltime=1:00:00"}


def is_torque(text: str) -> bool:
    """The script is for Torque: it uses variables that PBS does not set, or `hpcddp render` made it so."""
    ours = r"^# Made by hpcddp \S+ for site generic-torque\b"
    return bool(re.search(rf"\$\{{?PBS_(NUM_PPN|NUM_NODES|ARRAYID|NP|GPUFILE|VNODENUM)\b|{ours}", text, re.MULTILINE))


def read_pbs(text: str, torque: bool = False) -> ScriptDirectives:
    """Read a script as qsub does; `torque`: Torque's qsub, which has more options."""
    for number, line in numbered(text):
        if line.endswith("\r") and text.count("\n") >= number:
            return ScriptDirectives("pbs", refusals=(Refusal(number, "script contains cr, lf", UNIX_LINES),))
    options: list[Option] = []
    refusals: list[Refusal] = []
    unread: list[int] = []
    command_line = 0
    lines = numbered(text)
    at = 0
    while at < len(lines):
        number, line = lines[at]
        at += 1
        if not line.lstrip(" \t").startswith("#PBS"):
            command_line = command_line or (number if _is_executable(line) else 0)
            continue
        if command_line:
            unread.append(number)
            continue
        wanted = line.lstrip(" \t")[len("#PBS") :]
        while wanted.rstrip().endswith("\\") and at < len(lines):  # the next line is joined on, its #PBS included
            wanted = wanted.rstrip()[:-1] + lines[at][1]
            at += 1
        for found in _read_directive(wanted, number, _LETTERS + _TORQUE if torque else _LETTERS):
            if isinstance(found, Option):
                options.append(found)
            else:
                refusals.append(found)
    return ScriptDirectives("pbs", tuple(options), tuple(refusals), tuple(unread), command_line, torque)


def _read_directive(wanted: str, line: int, letters: str) -> Iterator[Option | Refusal]:
    """The options of one directive, and why qsub refuses it."""
    try:
        found = list(split_short_options(split_pbs(wanted), partial(_takes_value, letters)))
    except UnmatchedError as e:
        yield Refusal(line, str(e))
        return
    unknown = [name for name, value in found if value is None]
    stray = " ".join(value for name, value in found if name == "?" and value)
    if unknown:
        what = f"directive error: {wanted.strip()!r}: PBS has no option {unknown[0]}"
        yield Refusal(line, what, f"{_INSTEAD.get(unknown[0], 'an option of PBS: man qsub')}; {ON_TORQUE}")
    elif stray:
        yield Refusal(line, f"directive error: {wanted.strip()!r}: {stray!r} belongs to no option")
    for name, value in found:
        if value is None or name == "?":
            continue
        try:
            yield from _options(name, value, line)
        except ListError as e:
            yield Refusal(line, f"illegal {name} value: {e}", "NAME=VALUE, several with commas, without blanks")


def split_pbs(text: str) -> Tokens:
    """Words as make_argv makes them: quotes group and join, a backslash works outside quotes only, `#` is a letter."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    letters = iter(text)
    for c in letters:
        if quote:
            if c == quote:
                quote = ""
            else:
                word = (word or "") + c
        elif c in " \t\n":
            if word is not None:
                words.append(word)
            word = None
        elif c in "'\"":
            quote, word = c, word or ""
        else:
            word = (word or "") + (next(letters, "") if c == "\\" else c)
    if quote:
        raise UnmatchedError(f"unmatched {quote}")
    return (*words, word) if word is not None else tuple(words)


def _is_executable(line: str) -> bool:
    """The line ends the directives: a lone `:` and `#!` at the start do not."""
    return not line.startswith((":", "#!")) and line.strip() != "" and not line.strip().startswith("#")


def _takes_value(letters: str, letter: str) -> bool | None:
    at = letters.find(letter) if letter.isalpha() else -1
    return None if at < 0 else letters[at + 1 : at + 2] == ":"


def _options(name: str, value: str, line: int) -> Iterator[Option]:
    """`-l a=1,b=2` and `-W a=1,b=2` as one option per resource or attribute. Raises ListError."""
    if name in {"-l", "-W"}:
        for key, given in split_resources(value) if name == "-l" else split_attributes(value):
            yield Option(f"{name} {key}", given, line)
    else:
        yield Option(name, value, line)


# ---- lists in #PBS options, split as qsub and the server split them: `-l a=1,b=2`, `-W a=1,b=2`, select's chunks

Pairs = list[tuple[str, str]]


def split_resources(text: str) -> Pairs:
    """`select=2:ncpus=4,walltime=60` as names and values; a name alone has the value "". Raises ListError.

    A comma or a blank ends a value, so that `select=1: ncpus=2` is two resources; quotes are taken off.
    """
    found: Pairs = []
    item, quote, last = "", "", ","
    for c in f"{text},":
        if c in "'\"" and c == (quote or c):  # a quote of the other kind is a letter
            quote = "" if quote else c
        elif quote or (c != "," and not c.isspace()):
            item += c
        elif c.isspace() and item.endswith("="):
            continue
        else:
            if (not item and c == last == ",") or item.startswith("="):
                raise ListError(f"-l {text}: a resource without a name, or a comma too many")
            name, _, value = item.partition("=")
            found += [(name, value)] if item else []
            item, last = "", c if c == "," else last if not item else ""
    if quote:
        raise ListError(f"-l {text}: no closing {quote}")
    return found


def split_attributes(text: str) -> Pairs:
    """`umask=022,depend=afterok:1,afterany:2` as names and values. Raises ListError.

    A value goes up to the last comma before the next `=`.
    """
    pairs = [re.fullmatch(r"\s*([^\s=,]+)\s*=([^=]*(?<!,))", item) for item in re.split(r",(?=[^=,]*=)", text)]
    if None in pairs:
        raise ListError(f"-W {text}: not NAME=VALUE, several with commas")
    return [(pair[1], pair[2].strip()) for pair in pairs if pair]


_RESOURCE = re.compile(r"([A-Za-z][\w-]*)=((?:[^:+'\"]|'[^']*'|\"[^\"]*\")*)", re.ASCII)


def chunks(select: str) -> list[tuple[int, dict[str, str]]]:
    """`2:ncpus=8:mpiprocs=4+1:ncpus=2` as counts and resources by name; [] if it is not of that form."""
    found: list[tuple[int, dict[str, str]]] = []
    for chunk in re.findall(r"(?:[^+'\"]|'[^']*'|\"[^\"]*\"|['\"])+|(?<=\+)$", select):
        words = re.findall(r"(?:[^:'\"]|'[^']*'|\"[^\"]*\"|['\"])+|(?<=:)$", chunk)
        count = words.pop(0) if words and words[0].isdecimal() and words[0].isascii() else "1"
        resources = [_RESOURCE.fullmatch(word) for word in words]
        if chunk == "" or None in resources:
            return []
        found.append((int(count[:18]), {each[1]: each[2] for each in resources if each}))
    return found


# ---- Slurm

_SLURM = find_scheduler("slurm").directives
# Options whose value, if they have one, is joined on: the next word is none.
_SLURM_ALONE = {
    "contiguous", "exclusive", "export-file", "get-user-env", "help", "hold", "ignore-pbs", "immediate", "nice",
    "no-kill", "no-requeue", "overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue",
    "share", "spread-job", "test-only", "usage", "use-min-nodes", "verbose", "version", "wait",
}  # fmt: skip

_COMPONENT = {"hetjob", "packjob"}
_SLURM_VALUED = {"comment", "gres", "gpus-per-node", "gpus-per-task", "mem", "ntasks-per-node", "reservation", "signal"}


def read_slurm(text: str) -> ScriptDirectives:
    """Read a script as sbatch does. Unknown options are left to it: plugins add some."""
    lines = numbered(text)
    if not text.startswith("#!"):
        return ScriptDirectives(
            "slurm", refusals=(Refusal(1, "a batch script must begin with #!", "#!/bin/bash as the first line"),)
        )
    for number, line in lines:
        if line.endswith("\r") and text.count("\n") >= number:
            return ScriptDirectives(
                "slurm", refusals=(Refusal(number, "batch script contains DOS line breaks", UNIX_LINES),)
            )
    words: list[tuple[str, int]] = []  # of all lines: an option at a line's end takes its value from the next one
    refusals: list[Refusal] = []
    unread: list[int] = []
    command_line = 0
    for number, line in lines:
        if not line.startswith("#SBATCH"):
            if line.lstrip().startswith("#SBATCH") and not line.lstrip().startswith("#SBATCH#"):
                unread.append(number)  # indented: a comment to sbatch
            command_line = command_line or (number if line.strip() and not line.strip().startswith("#") else 0)
        elif command_line:
            unread.append(number)
        else:
            try:
                words += [(word, number) for word in split_slurm(line[len("#SBATCH") :])]
            except UnmatchedError as e:
                refusals.append(Refusal(number, str(e)))
    ends = [i for i, (word, _) in enumerate(words) if word in _COMPONENT]
    component = next((i for i in ends if any(word not in _COMPONENT for word, _ in words[:i])), None)
    options, stray = parse_slurm_words([one for one in words[:component] if one[0] not in _COMPONENT])
    refusals += [Refusal(number, f"invalid directive found in batch script: {word}") for word, number in stray]
    return ScriptDirectives("slurm", tuple(options), tuple(refusals), tuple(unread), command_line)


def split_slurm(text: str) -> Tokens:
    """Words as sbatch makes them: a backslash vanishes, in quotes too; an unquoted `#` ends the line."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    escaped = False
    for c in text:
        if c in " \t" and not quote:
            if word == "":
                return tuple(words)  # a word of quotes or a backslash alone ends the line
            escaped = False  # a backslash before a blank vanishes, and the word ends
            if word is not None:
                words.append(word)
            word = None
        elif escaped:
            word, escaped = (word or "") + c, False
        elif c == "\\":
            word, escaped = word or "", True
        elif quote:
            if c == quote:
                quote = ""
            else:
                word = (word or "") + c
        elif c in "'\"":
            quote, word = c, word or ""
        elif c == "#":
            break
        else:
            word = (word or "") + c
    if quote:
        raise UnmatchedError(f"unmatched {quote}")
    return (*words, word) if word else tuple(words)


def parse_slurm_words(words: list[tuple[str, int]]) -> tuple[list[Option], list[tuple[str, int]]]:
    """Options under their long names, and the stray words, each with its line."""
    found: list[Option] = []
    stray: list[tuple[str, int]] = []
    rest = list(words)
    while rest:
        word, line = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = word[:2], word[2:]
            equals = "=" if value else ""
        else:
            stray.append((word, line))
            continue
        name = full_name(_SLURM, name).lstrip("-")
        known = (
            name in _SLURM.letters.values() or name in _SLURM_VALUED
        )  # of another option it is not known that it has a value
        if not equals and name not in _SLURM_ALONE and rest and (known or not rest[0][0].startswith("-")):
            value = rest.pop(0)[0]
        found.append(Option(f"--{name}", value, line))
    return found, stray
