"""Readers of single values: what a YAML file or an option holds, to what the program works with.

YAML is loaded without types (see site_file.py), so a value is text, a list or a mapping, and `1:30:00`, `no` and `0010`
are what they say. `where` names the value's source in errors.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hpcddp.errors import RequestError, nearest
from hpcddp.units import assign, parse_count, parse_walltime, read_number, shorten

_QUOTED = r"""\\[^\n]|'[^']*'|"(?:\\.|[^"\\])*\""""  # in a shell's line
Reader = Callable[[object, str], Any]
#: What `module` does beside loading, and how many words each needs behind it.
MODULE_WORDS = {"purge": 0, "reset": 0, "restore": 1, "swap": 2, "switch": 2, "unload": 1, "use": 1, "unuse": 1}


def read_text(value: object, where: str) -> str:
    """Read one line of text, not empty."""
    if not isinstance(value, str):
        what = f"{where} is a {_kind(value)}, not a plain value"
        raise RequestError(what, f"write it on one line: {assign(where, 'VALUE')}")
    if not value:
        raise RequestError(f"{where} has no value", f"{assign(where, 'VALUE')}, or leave it out")
    _refuse_nul(value, where)
    if "\n" in value:
        what = f"{where} {value!r} is not one line of text"
        raise RequestError(what, f"write it on one line: {assign(where, 'VALUE')}")
    return value


def read_count(value: object, where: str) -> int:
    """A whole number of 1 or more."""
    return parse_count(read_text(value, where), where)


def read_whole_number(value: object, where: str) -> int:
    """A whole number of 0 or more."""
    text = read_text(value, where)
    number = read_number(text.strip())
    if number is None:
        raise RequestError(f"{where} {shorten(text)!r} is not a whole number of 0 or more", assign(where, "4"))
    return number


def read_hours(value: object, where: str) -> float:
    """A number of hours above 0, such as 1.5."""
    text = read_text(value, where)
    if not re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text) or float(text) == 0:
        raise RequestError(f"{where} {text!r} is not a number of hours", assign(where, "1.5"))
    return float(text)


def read_duration(value: object, where: str) -> int:
    """A duration, such as `2:30:00` or `90m`, to seconds."""
    return parse_walltime(read_text(value, where), where)


def read_day(value: object, where: str) -> str:
    """A day, as 2026-11-24."""
    text = read_text(value, where)
    try:
        datetime.date.fromisoformat(text)
    except ValueError as e:
        raise RequestError(f"{where} {text!r} is not a day", assign(where, "2026-11-24")) from e
    return text


def read_flag(value: object, where: str) -> bool:
    """`true` or `false`, nothing else."""
    return read_known(("true", "false"), value, where) == "true"


def read_preflight(value: object, where: str) -> str:
    """A line of shell, of which `true` is one: the check without more. Empty: none."""
    text = read_text(value, where)
    return "" if text == "false" else text


def read_words(value: object, where: str) -> tuple[str, ...]:
    """A list of words; a plain string is split like a shell line, and `[]` is none."""
    if value == "[]":
        return ()
    if isinstance(value, str):
        _refuse_nul(value, where)
        import shlex

        try:
            return tuple(shlex.split(value))
        except ValueError as e:
            what = f"{where} {value!r} cannot be split into words: {e}"
            raise RequestError(what, "write it as a list: [a, b]") from e
    if not isinstance(value, list):
        raise RequestError(f"{where} is not a list of words", "write it as a list: [a, b]")
    for word in value:
        if not isinstance(word, str):
            what = f"{where} has a word that YAML reads as something else: {word}"
            raise RequestError(what, 'quotes around it: "{world_size}"')
        _refuse_nul(word, where)
    return tuple(value)


def read_command(value: object, where: str) -> tuple[str, ...]:
    """A list of words; or text that is split like a shell line, with any operator of the shell's in quotes. A backslash
    at the end of a line joins the next one on."""
    if isinstance(value, str):
        value = value.replace("\\\n", " ").strip()
        plain = re.sub(_QUOTED, "_", value, flags=re.DOTALL)
        found = next((word for word in plain.split() if re.search(r"^[|&;<>]|^\d+[<>]|[|&;<>]$", word)), None)
        if found is not None or "\n" in plain:
            what = f"has {found!r}" if found else "has several lines"
            hint = f"{assign(where, 'bash -c')} '…' for a shell's line; or a list of words: [python, train.py]"
            raise RequestError(f"{where} {what}, and no shell reads it", hint)
    return read_words(value, where)


def read_name_list(value: object, where: str) -> tuple[str, ...]:
    """Names, also with commas between them."""
    return tuple(name for word in read_words(value, where) for name in word.split(",") if name)


def read_directives(value: object, where: str) -> tuple[str, ...]:
    """Options of a scheduler's directive: a word without a dash is the value of the option before it."""
    options: list[str] = []
    for word in read_words(value, where):
        if word.startswith("-") or not options:
            options.append(word)
        else:
            options[-1] += f"{'=' if options[-1].startswith('--') else ' '}{word}"
    return tuple(options)


def module_lines(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The arguments of each call of `module`: a name is loaded."""
    lines, rest = list[tuple[str, ...]](), list(words)
    while rest:
        word = rest.pop(0)
        if word in MODULE_WORDS:
            count = MODULE_WORDS[word]
            lines.append((word, *rest[:count]))
            del rest[:count]
        else:
            lines.append(("load", word))
    return lines


def read_lines(value: object, where: str) -> tuple[str, ...]:
    """Whole lines: a list of them, or one."""
    lines = value if isinstance(value, list) else [value]
    return tuple(read_text(line, where) for line in lines)


def read_variables(value: object, where: str) -> dict[str, str]:
    """A mapping of environment variables to their values, which may be empty."""
    if value == "":
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is a {_kind(value)}, not a mapping", "write NAME: value, one per line, indented")
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RequestError(f"{where}: {name!r} is not a variable's name", "use letters, digits and _")
        if not isinstance(text, str):
            raise RequestError(f"{where}: {name} is a {_kind(text)}, not text", f"write {name}: VALUE")
        _refuse_nul(text, where)
    return dict(value)


def read_choice(*known: str) -> Reader:
    """A reader that takes exactly these words."""
    return partial(read_known, known)


def read_known(known: tuple[str, ...], value: object, where: str, synonyms: Mapping[str, str] | None = None) -> str:
    """Read one of these words. An error's hint has the likely word, by `synonyms` or else by its spelling."""
    text = read_text(value, where)
    if text not in known:
        same = (synonyms or {}).get(text.lower())
        hint = assign(where, same) if same else f"one of {', '.join(known)}{nearest(text, list(known))}"
        raise RequestError(f"{where} {text!r} is not known", hint)
    return text


def read_mapping(value: object, readers: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """Each key of a mapping through its reader; an empty value counts as absent. Refuses unknown keys."""
    if value == "":
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is a {_kind(value)}, not a mapping of keys", "write key: value, one per line")
    refuse_unknown(dict.fromkeys(value, f"in {where}"), list(readers), "docs/sites.md")
    return {key: readers[key](v, f"{key} in {where}") for key, v in value.items() if v != ""}


_BY_TYPE: dict[str, Reader] = {
    "str": read_text,
    "int": read_count,
    "float": read_hours,
    "bool": read_flag,
    "tuple[str, ...]": read_words,
    "Mapping[str, str]": read_variables,
}


def readers_of(record: type[Any], **others: Reader | None) -> dict[str, Reader]:
    """The keys that a record is read from, each with its reader: that of `others` (None: it is no key), else the usual
    one of the field's type. A field `walltime_s` is the key `walltime`, whose text is a time."""
    readers: dict[str, Reader] = {}
    for field, kind in record.__annotations__.items():
        key = field.removesuffix("_s")
        if key not in others:
            readers[key] = read_duration if key != field else _BY_TYPE[kind.removesuffix(" | None")]
        elif (reader := others[key]) is not None:
            readers[key] = reader
    return readers


def fields_of(record: type[Any]) -> dict[str, str]:
    """The field of each key: `walltime_s` of `walltime`."""
    return {field.removesuffix("_s"): field for field in record.__annotations__}


def refuse_unknown(given: Mapping[str, str], known: list[str], keys: str) -> None:
    """RequestError that names every key of `given` which is not known, each with its source and the key that is
    nearest. `keys`: where all of them are listed."""
    unknown = [f"{key!r} {source}{nearest(key, known)}" for key, source in given.items() if key not in known]
    if unknown:
        raise RequestError(f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}", f"known keys: {keys}")


def _refuse_nul(text: str, where: str) -> None:
    if "\0" in text:
        what = f"{where} {text!r} holds a NUL character, which no path and no argument can carry"
        raise RequestError(what, "leave the character out")


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "mapping" if isinstance(value, Mapping) else "text"
