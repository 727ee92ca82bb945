"""A file through the table of mistakes, and the request that hpcddp would take instead."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from hpcddp.errors import RequestError
from hpcddp.script.lint.finding import Finding, Said
from hpcddp.script.lint.launches import torchrun_words
from hpcddp.script.lint.rules import PYTHON_RULES, RULES
from hpcddp.script.lint.script import Script
from hpcddp.script.words import quote_words

_KINDS = {True: "mistake", False: "warning"}


def lint_script(file: str, script: Script) -> list[Finding]:
    """Every mistake of a job script, by line."""
    return _sorted(_finding(file, r.id, r.certain, said) for r in RULES for said in r.check(script))


def lint_python(file: str, text: str) -> list[Finding]:
    """Every mistake of a training script, by line. Raises RequestError if it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise RequestError(f"{file} is not Python: {e}", f"python -m py_compile {file}") from e
    return _sorted(_finding(file, id_, certain, said) for id_, certain, check in PYTHON_RULES for said in check(tree))


def equivalent(script: Script) -> str:
    """The `hpcddp render` line for the same job, as far as the script says what it wants; "" without a command."""
    started = next((launch.started for launch in script.launches if launch.started), ())
    torchrun = torchrun_words(started) or next((t for c in script.commands if (t := torchrun_words(c.words))), ())
    command = _behind_torchrun(torchrun) if torchrun else started
    if not command:
        return ""
    request = script.request
    site = script.site.name if script.site else {"pbs": "generic-pbs", "slurm": "generic-slurm"}.get(script.scheduler)
    options: list[tuple[str, object]] = [
        ("--site", site or "SITE"),
        ("--nodes", request.nodes),
        ("--gpus-per-node", request.gpus_per_node),
        ("--walltime", request.walltime and request.walltime.value),
        ("--queue", request.queue and request.queue.value),
        ("--account", request.account and request.account.value),
    ]
    words = [w for name, value in options if value for w in (name, str(value))]
    return quote_words(["hpcddp", "render", *words, "--", *command])


def _behind_torchrun(words: tuple[str, ...]) -> tuple[str, ...]:
    """What torchrun starts: from the first word that is a script, or behind -m."""
    at = next((i for i, w in enumerate(words[1:], 1) if w.endswith(".py") or w in {"-m", "--module"}), None)
    return ("python", *words[at:]) if at else ()


def _finding(file: str, rule: str, certain: bool, said: Said) -> Finding:
    return Finding(file, said.line, rule, _KINDS[certain], said.what, said.instead)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.rule))
