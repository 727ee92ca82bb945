"""A file through the table of mistakes."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable

from hpcddp.errors import RequestError
from hpcddp.lint.finding import Finding, Said
from hpcddp.lint.rules import PYTHON_RULES, RULES
from hpcddp.lint.script import Script
from hpcddp.lint.training_script import read_training_script

_KINDS = {True: "mistake", False: "warning"}


def lint_script(file: str, script: Script) -> list[Finding]:
    """Every mistake of a job script, by line."""
    _refuse_no_text(file, script.text)
    return _sorted(_finding(file, r.id, r.certain, said) for r in RULES for said in r.check(script))


def lint_python(file: str, text: str) -> list[Finding]:
    """Every mistake of a training script, by line. Raises RequestError if it is no Python."""
    _refuse_no_text(file, text)
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


def _refuse_no_text(file: str, text: str) -> None:
    """Refuses what is no script: "nothing was found" would look like a good result."""
    if not text.strip():
        raise RequestError(f"{file} is empty", f"check the path: ls -l {file}")
    if "\0" in text:
        raise RequestError(f"{file} is a binary file, not a script", f"see what it is: file {file}")
    if text.lstrip().startswith("{") and '"nbformat"' in text:
        raise RequestError(f"{file} is a notebook, not a script", f"jupyter nbconvert --to script {file}")


def _finding(file: str, rule: str, certain: bool, said: Said) -> Finding:
    return Finding(file, said.line, rule, _KINDS[certain], said.what, said.instead)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.rule))
