"""The modules of a site's file against the module system of this machine, as a login shell shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcddp.record import Record
from hpcddp.schedulers.row import Answer
from hpcddp.script.site import Site
from hpcddp.script.site_check import CHECKED, Difference
from hpcddp.script.words import quote_word

_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)


class ModulesFound(Record):
    """`missing`: a module of the file that is not there -> those of the same name that are. `problem`: why the module
    system could not be asked."""

    missing: Mapping[str, tuple[str, ...]] = {}  # never written to
    problem: str = ""


def compare_modules(site: Site, ask: Callable[[str], Answer]) -> tuple[list[Difference], list[str]]:
    """The modules of the file that are not there, and what could not be asked. `ask` gives lines to a login shell.

    A module may show only what others need once it is loaded. So one that is not there is asked again with the only
    other version in its place, and without one, those that are not found after it are unknown.
    """
    load, told, unasked = list(site.modules.load), list[tuple[str, bool]](), list[str]()
    for _ in site.modules.load:
        answer = ask(module_questions(site, load))
        found = read_modules(answer.stdout, answer.status)
        missing = [name for name in load if name in found.missing]
        if found.problem or not missing:
            unasked += [found.problem] if found.problem else []
            break
        first, others = missing[0], found.missing[missing[0]]
        known = f"; there is {', '.join(others[:6])}" if others else ""
        told.append((f"module {first} is not there{known}", len(others) == 1))
        if len(others) != 1:
            unasked += [f"module {name}: not found without {first}" for name in missing[1:]]
            break
        load[load.index(first)] = others[0]
    correction: dict[str, Any] = {"modules": {"load": load, "source": CHECKED}}
    return [Difference(text, correction if clear else {}) for text, clear in told], unasked


def module_questions(site: Site, load: Sequence[str]) -> str:
    """Shell lines for a login shell, which ask for each module and load it; the file's own first lines go before."""
    begin = [site.modules.init] if site.modules.init else []
    lines = [*begin, "type module >/dev/null 2>&1 || { echo HPCDDP-NO-MODULES; exit; }", *site.modules.before]
    for name in load:
        word, base = quote_word(name), quote_word(name.split("/")[0])
        lines.append(
            f"echo; echo HPCDDP-MODULE {word}; if module is-avail {word} >/dev/null 2>&1; then echo HPCDDP-THERE; "
            f"else module -t avail {base} 2>&1; fi; module load {word} </dev/null >/dev/null 2>&1"
        )
    return "\n".join([*lines, "echo; echo HPCDDP-ASKED"]) + "\n"


def read_modules(text: str, status: int) -> ModulesFound:
    """What the shell lines of `module_questions` have printed. Where `is-avail` is not known, a line of the list has to
    be the module, or a version of it."""
    if "HPCDDP-NO-MODULES" in text or ("HPCDDP-ASKED" not in text):
        return ModulesFound(problem=f"the module system does not answer in a login shell (status {status})")
    missing: dict[str, tuple[str, ...]] = {}
    for part in text.split("HPCDDP-MODULE ")[1:]:
        name, *lines = [line.strip() for line in part.splitlines()]
        others = [re.sub(r"\((default|D|L)[^)]*\)$", "", line).rstrip("/").strip() for line in lines]
        if "HPCDDP-THERE" in others or any(other == name or other.startswith(f"{name}/") for other in others):
            continue
        base = name.split("/")[0]
        same = [other for other in others if _NAME.fullmatch(other) and other.startswith(f"{base}/")]
        missing[name] = tuple(dict.fromkeys(same))
    return ModulesFound(missing)
