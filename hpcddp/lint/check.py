"""A file through the table of mistakes."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from hpcddp.errors import RequestError
from hpcddp.lint.finding import Finding, Said
from hpcddp.lint.rules import PYTHON_RULES, RULES
from hpcddp.lint.script import Script

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


def _finding(file: str, rule: str, certain: bool, said: Said) -> Finding:
    return Finding(file, said.line, rule, _KINDS[certain], said.what, said.instead)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.rule))
