"""#PBS lines, read as qsub reads them: OpenPBS `src/cmds/qsub_sup.c` (get_script), `src/cmds/qsub.c` (make_argv).

Checked against what a real OpenPBS 23.06 accepted, refused and recorded (tests/captures/pbs/directives.json).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from hpcddp.lint.directive import (
    UNIX_LINES,
    ListError,
    Option,
    Refusal,
    ScriptDirectives,
    Tokens,
    UnmatchedError,
    numbered,
    split_options,
)
from hpcddp.lint.pbs_values import ON_TORQUE, chunks, split_attributes, split_resources

__all__ = ["chunks", "is_torque", "read_pbs", "split_pbs"]

# GETOPT_ARGS of qsub: a letter, with a colon if it takes a value
_LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"
_TORQUE = "t:d:D:w:F:n"  # Torque's own
_INSTEAD = {"-t": "#PBS -J FIRST-LAST", "-d": "cd FOLDER below", "-w": "cd FOLDER below", "--": "-l walltime=1:00:00"}
_PREFIX = "#PBS"


def is_torque(text: str) -> bool:
    """Whether a script is for Torque, as far as it shows: by variables that PBS does not set, or by our own remark."""
    ours = r"^# Made by hpcddp \S+ for site generic-torque\b"
    return bool(re.search(rf"\$\{{?PBS_(NUM_PPN|NUM_NODES|ARRAYID|NP|GPUFILE|VNODENUM)\b|{ours}", text, re.MULTILINE))


def read_pbs(text: str, torque: bool = False) -> ScriptDirectives:
    """What qsub takes from a script; `torque`: Torque's qsub, which has more options."""
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
        if not line.lstrip(" \t").startswith(_PREFIX):
            command_line = command_line or (number if _is_executable(line) else 0)
            continue
        if command_line:
            unread.append(number)
            continue
        wanted = line.lstrip(" \t")[len(_PREFIX) :]
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
        found = list(split_options(split_pbs(wanted), partial(_takes_value, letters)))
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
    """Whether this line ends the directives: a lone `:` and `#!` at the start do not."""
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
