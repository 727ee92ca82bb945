"""A file through the table of mistakes."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable

from hpcddp.errors import RequestError
from hpcddp.lint.finding import Finding, Said
from hpcddp.lint.python_rules import find_spawning
from hpcddp.lint.rules import PYTHON_RULES, RULES
from hpcddp.lint.script import Script
from hpcddp.lint.training_script import read_training_script
from hpcddp.script.words import quote_words

_KINDS = {True: "mistake", False: "warning"}


def lint_script(file: str, script: Script) -> list[Finding]:
    """Every mistake of a job script, by line."""
    refuse_no_text(file, script.text)
    return _sorted(_finding(file, r.id, r.certain, said) for r in RULES for said in r.check(script))


def lint_python(file: str, text: str) -> list[Finding]:
    """Every mistake of a training script, by line. Raises RequestError if it is no Python."""
    refuse_no_text(file, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks about "\\d"
            # bytes: the file may name its encoding in the first line
            script = read_training_script(ast.parse(text.encode("utf-8", "surrogateescape")))
    except (SyntaxError, ValueError) as e:
        raise RequestError(f"{file} is not Python: {e}", f"python -m py_compile {file}") from e
    except (RecursionError, MemoryError) as e:
        raise RequestError(f"{file} is nested too deeply to be read", f"python -m py_compile {file}") from e
    return _sorted(_finding(file, id_, certain, said) for id_, certain, check in PYTHON_RULES for said in check(script))


def find_spawning_line(text: bytes) -> int:
    """Where a training script starts a node's ranks itself, whatever its options (A20); 0 for nowhere, or no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = list(find_spawning(read_training_script(ast.parse(text))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    return min((call.lineno for call in calls), default=0)


def refuse_no_text(file: str, text: str) -> None:
    """Refuses what is no script: "nothing was found" would look like a good result."""
    if not text.strip():
        raise RequestError(f"{file} is empty", f"check the path: ls -l {quote_words([file])}")
    # no line of text begins with such a byte; further on, a script may have bytes of another encoding
    if "\0" in text or re.match(r"[\x01-\x08\x0e-\x1f\x7f\udc80-\udcff]", text):
        raise RequestError(f"{file} is a binary file, not a script", f"see what it is: file {quote_words([file])}")
    if file.endswith(".ipynb") or (text.lstrip("\ufeff \t\r\n").startswith("{") and '"nbformat"' in text):
        name = quote_words([file.removesuffix(".ipynb")])
        hint = f"jupyter nbconvert --to script {quote_words([file])}"
        hint += f" && hpcddp lint {name}.py" if file.endswith(".ipynb") else ""
        raise RequestError(f"{file} is a notebook, not a script", hint)


def _finding(file: str, rule: str, certain: bool, said: Said) -> Finding:
    return Finding(file, said.line, rule, _KINDS[certain], said.what, said.instead)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.rule))
