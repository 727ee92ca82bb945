"""Which command a run was made for, and the name that a run gets from it.

Two commands are the same if their words are, but for the path of the interpreter or program and the interpreter's own
options: `/opt/env/bin/python3.12 -u train.py` is `python train.py`. Of a secret's value there is a digest.
"""

from __future__ import annotations

import json
import os
import re

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.row import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python whose value is a word of its own
#: A run's name, with the index of an array or without.
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{LONGEST_NAME - 1}}}")
_LONGEST = 64  # characters of a name that a command gives
_DIGITS = 10  # of the digest
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
_WORD = r"[A-Za-z0-9_.]+"
_OPTION = r"--(?:[A-Za-z_]+-)*[A-Za-z_][A-Za-z0-9_]*"  # a digit in its last part only
_PLAIN_OPTION = r"--(?:[A-Za-z_]+-)*[A-Za-z_]+"  # a number may follow at once
_SCRIPT = r"[A-Za-z][A-Za-z0-9_]*\.(?:py|sh)"
_SCRIPT_ALONE = r"[A-Za-z][A-Za-z0-9_-]*[A-Za-z_]\.(?:py|sh)"  # without arguments: no part of it could be an option
_MODULE = r"[A-Za-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)+"  # its dots tell it from a script
# A program and its arguments that a name says whole and unchanged, with NUL between two words.
_WHOLE = re.compile(
    rf"(?:-m\0{_MODULE}|{_SCRIPT})(?:\0{_OPTION}(?:\0{_WORD})?|\0{_PLAIN_OPTION}\0{_NUMBER})*|{_SCRIPT_ALONE}"
)
# Ends as a digest, a run that was set aside or an index: `x.7`, but not `lr0.1`, since no array's name ends in a digit.
_AMBIGUOUS = re.compile(rf".*(-[0-9a-f]{{{_DIGITS}}}|\.old[0-9]+|[^0-9]\.[0-9]+)")
_SHOWN = re.compile(r"[\w./=:,+{}~\[\]-]+", re.ASCII)  # no text, no JSON, no address with a password
_SECRET = re.compile(
    r"(.*-)?((api|access|auth|private|secret|wandb)-?key|(access|api|auth|hf|hub)?-?token|secret|credentials?"
    r"|pass(word|wd|phrase)|pwd)"
)
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def identify_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words that make a command what it is: run folders hold them, and error messages show them."""
    if not words:
        return ()
    program, rest = os.path.basename(words[0]), _hide_secrets(words[1:])
    if not re.fullmatch(r"python[\d.]*", program):
        return (program, *rest)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "-m", "-c"}:
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    if rest and not rest[0].startswith("-"):
        rest[0] = os.path.normpath(rest[0])
    return ("python", *rest)


def identify_program(command: Sequence[str]) -> tuple[str, ...]:
    """The program without its arguments and what starts it: two runs of one script have it in common."""
    return tuple(_find_program(list(command))[0]) if command else ()


def _hide_secrets(words: Sequence[str]) -> list[str]:
    """The words with a digest in place of the value of `--token` and the like: it compares as well."""
    hidden = list(words)
    for nth, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not _is_secret(key):
            continue
        if equals:
            hidden[nth] = f"{key}={_digest([value])}"
        elif word.startswith("-") and nth + 1 < len(words) and not words[nth + 1].startswith("-"):
            hidden[nth + 1] = _digest([words[nth + 1]])
    return hidden


def _is_secret(key: str) -> bool:
    plain = re.sub(r"[._]", "-", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", key)).lstrip("-+").lower()
    return _SECRET.fullmatch(plain) is not None


def _digest(words: Sequence[str]) -> str:
    import hashlib  # only for such a word or name

    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:_DIGITS]


def name_command(words: Sequence[str], *, indexed: bool = False) -> str:
    """The name that a run gets from its command, with its placeholders as they are: `train-lr1e-3-amp+` of
    `python train.py --lr 1e-3 --amp`. Two programs or lists of arguments have two names; what only starts the program
    is no part of it. Where the words cannot be read back from the name, a digest of them ends it. `indexed`: of an
    array, whose runs are `NAME.1`, `NAME.2`, …"""
    program, rest = _find_program(list(words))
    name, has_secret, arguments = _show_program(program), False, list(rest)
    while arguments:
        word, value = arguments.pop(0), None
        if word.startswith("-") and "=" not in word and arguments and not arguments[0].startswith("-"):
            value = arguments.pop(0)
        key, equals, text = word.partition("=")
        is_secret = _is_secret(key) and (value is not None or equals != "")
        has_secret = has_secret or is_secret
        if is_secret:
            name += f"-{_show(key)}"
        elif not re.fullmatch(_OPTION, word):
            name += "".join(f"-{_show(one)}" for one in (key, text if equals else value) if one)
        elif value is not None and re.fullmatch(_NUMBER, value) and not re.search("[0-9]", key):
            name += f"-{key[2:]}{value}"
        else:
            name += f"-{key[2:]}+{value if re.fullmatch(_WORD, value or '') else _show(value or '')}"
    is_whole = _WHOLE.fullmatch("\0".join((*program, *rest))) and not has_secret and len(name) <= _LONGEST
    if is_whole and not (_AMBIGUOUS.fullmatch(name) or (indexed and name[-1:].isdecimal())):
        return name
    name = re.sub("-{2,}", "-", name).lstrip("-_.+")
    name = name if name[:1].isalpha() else f"job-{name}"
    return f"{name[: _LONGEST - _DIGITS - 1].rstrip('-_.+')}-{_digest([*program, *rest])}"


def _find_program(words: list[str]) -> tuple[list[str], list[str]]:
    """Split off what starts a program: `train.py`, `-m pkg.train`, `./solve`. A program on PATH gets an empty word
    first, which tells it from a file of that name."""
    from hpcddp.ranks.launch_commands import COMMANDS

    if words and os.path.basename(words[0]) == "env":
        words = words[next((at for at, word in enumerate(words[1:], 1) if "=" not in word), 0) :]
    known = list(identify_command(words))
    if not known:
        return ["job"], []
    if any(command in COMMANDS for command in (known[0], " ".join(known[:2]), " ".join(known[1:3]))):
        rest = known[3 if known[0] == "python" else 1 :]
        for i, word in enumerate(rest):
            if word in {"-m", "--module"} and i + 1 < len(rest):
                return ["-m", rest[i + 1]], rest[i + 2 :]
            if word.endswith(".py"):
                return [os.path.normpath(word)], rest[i + 1 :]
    if known[0] == "python":
        if known[1:2] == ["-m"] and len(known) > 2:
            return known[1:3], known[3:]
        is_script = known[1:2] != [] and known[1].endswith(".py")
        return (known[1:2], known[2:]) if is_script else (known[:2], known[2:])
    if known[0] in _SHELLS:
        script = next((word for word in known[1:] if word[:1] not in {"-", "+"}), "")
        if script.endswith(".sh"):
            return [os.path.normpath(script)], known[known.index(script) + 1 :]
        return [known[0]], known[1:]
    return [os.path.normpath(words[0])] if "/" in words[0] else ["", words[0]], known[1:]


def _show_program(program: list[str]) -> str:
    stem, suffix = os.path.splitext(program[-1])
    if program[0] == "-m":
        return _show(program[-1])
    if len(program) > 1 or suffix not in {".py", ".sh"}:
        return _show("-".join(program))
    return stem if "/" not in stem else _show("-".join(stem.split("/")[-2:]))


def _show(word: str) -> str:
    """Shorten a word for a name: the last part of a path, in the alphabet of names."""
    if not _SHOWN.fullmatch(word):
        return ""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", word.rstrip("/").rpartition("/")[2]).strip("-.")


def check_run_name(text: str, where: str, correct: str = "{}") -> str:
    """RequestError for a name that is no single word, or could be an array's index or a run that was set aside.
    `correct`: how another name is typed."""
    if NAME.fullmatch(text) and not re.search(r"\.(old)?[0-9]+$", text):
        return text
    raise RequestError(
        f"{where} {text!r} is not one word of letters, digits and _ . + -, for job, folder and log, of at most"
        f" {LONGEST_NAME}, with a letter, digit or _ first, and without an index such as .7 or .old1 at its end",
        correct.format(nearest_name(text)),
    )


def nearest_name(text: str) -> str:
    """Turn any text into a run's name that is like it."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).lstrip("-.+")[:LONGEST_NAME]
    return re.sub(r"\.((?:old)?[0-9]+)$", r"_\1", name) or "train"
