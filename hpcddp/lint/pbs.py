"""#PBS lines, read as qsub reads them: OpenPBS `src/cmds/qsub_sup.c` (get_script), `src/cmds/qsub.c` (make_argv).

Checked against what a real OpenPBS 23.06 accepted, refused and recorded (tests/captures/pbs/directives.json).
"""

from __future__ import annotations

import re
from functools import partial

from hpcddp.lint.directive import Directives, Option, Refusal, UnmatchedError, Words, numbered, split_options

# GETOPT_ARGS of qsub: a letter, with a colon if it takes a value
_LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"
_TORQUE = "t:d:D:w:F:n"  # Torque's own, taken for good where a script asks for `-l nodes=`, as Torque's do
_PREFIX = "#PBS"


def read_pbs(text: str) -> Directives:
    """What qsub takes from a script."""
    for number, line in numbered(text):
        if line.endswith("\r") and text.count("\n") >= number:
            return Directives("pbs", refusals=(Refusal(number, "script contains cr, lf"),))
    options: list[Option] = []
    refusals: list[Refusal] = []
    unread: list[int] = []
    command_line = 0
    lines = numbered(text)
    letters = _LETTERS + (_TORQUE if re.search(r"^\s*#PBS.*-l\s*nodes=", text, re.MULTILINE) else "")
    takes_value = partial(_takes_value, letters)
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
        try:
            found = list(split_options(split_pbs(wanted), takes_value))
        except UnmatchedError as e:
            refusals.append(Refusal(number, str(e)))
            continue
        stray = [value if name == "?" else name for name, value in found if name == "?" or value is None]
        if stray:
            refusals.append(Refusal(number, f"directive error: {' '.join(map(str, stray))}"))
        options += [o for name, value in found if value is not None for o in _options(name, value, number)]
    return Directives("pbs", tuple(options), tuple(refusals), tuple(unread), command_line)


def split_pbs(text: str) -> Words:
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


def _options(name: str, value: str, line: int) -> list[Option]:
    """`-l a=1,b=2` and `-W a=1,b=2` as one option per resource or attribute."""
    if name not in {"-l", "-W"}:
        return [Option(name, value, line)]
    pieces = re.split(r",(?=\s*\w+(?:=|$|,))", value) if name == "-l" else re.split(r",(?=\w+=)", value)
    return [Option(f"{name} {key.strip()}", given, line) for key, _, given in (p.partition("=") for p in pieces)]


def chunks(select: str) -> list[tuple[int, dict[str, str]]]:
    """`2:ncpus=8:mpiprocs=4+1:ncpus=2` as counts and resources; [] if it is not of that form."""
    found: list[tuple[int, dict[str, str]]] = []
    for chunk in select.split("+"):
        first, *rest = chunk.split(":")
        if "=" in first:
            first, rest = "1", [first, *rest]
        if not first.isdecimal() or not all(re.fullmatch(r"\w+=[^=]+", r) for r in rest):
            return []
        found.append((int(first), dict(r.split("=") for r in rest)))
    return found
