"""One function out of a training script, with what it needs, and nothing else of the file.

A training script trains when it is imported, and often reads its arguments and opens a process group before. So the
file is not imported. Of its top level those statements run that the function needs, directly or through others of them:
imports, functions, classes and assignments, in their order. `if __name__ == "__main__":` never runs.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hpcddp.errors import HpcddpError, RequestError, nearest

_LONGEST = 160  # characters of somebody else's error


def describe_error(error: BaseException) -> str:
    """Kind and text, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST]}{'…' if len(text) > _LONGEST else ''}"


@contextmanager
def reraise_as_request(what: str, hint: str | Callable[[BaseException], str]) -> Iterator[None]:
    """An error of the user's code, or of torch about it, becomes a RequestError; also SystemExit."""
    try:
        yield
    except HpcddpError:
        raise
    except (Exception, SystemExit) as error:
        raise RequestError(f"{what} {describe_error(error)}", hint if isinstance(hint, str) else hint(error)) from error


@contextmanager
def without_command_line(file: str) -> Iterator[None]:
    """The script sees no arguments instead of those of `hpcddp advise`: its options have their defaults."""
    words, sys.argv = sys.argv, [file]
    try:
        yield
    finally:
        sys.argv = words


def parse_target(text: str) -> tuple[str, str]:
    """File and function of `train.py:make_model`. RequestError for another form."""
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name.isidentifier():
        example = f"{text.rstrip(':')}:make_model" if text.rstrip(":").endswith(".py") else "train.py:make_model"
        raise RequestError(f"{text!r} is no file and function", f"hpcddp advise {example}")
    return file, name


def load_function(file: str, name: str) -> Callable[[], object]:
    """The function, ready to be called without arguments. RequestError if it is not there."""
    tree = _parse(file)
    needed = _choose(tree, name)
    if not any(name in _list_bound(statement) for statement in needed):
        known = [one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
        guess = nearest(name, known)
        what = f"{file} has no function {name!r}{guess}"
        raise RequestError(what, f"one of {', '.join(known)}" if known else "def make_model(): …")
    module: dict[str, object] = {"__name__": "hpcddp_advised", "__file__": os.path.abspath(file)}
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    with reraise_as_request(f"what {name} needs of {file} cannot run:", partial(_hint, file)):
        exec(compile(ast.Module(needed, []), file, "exec"), module)  # noqa: S102  # the user's own file, as asked for
    function = module.get(name)
    if not callable(function) or (hasattr(function, "state_dict") and not isinstance(function, type)):
        raise RequestError(f"{name} in {file} is no function", f"def {name}(): … that returns the model")
    return function


def _hint(file: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"pip install {error.name}, or run this with the Python that has it"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"see line {lines[-1]} of {file}" if lines else f"python -m py_compile {file}"


def _parse(file: str) -> ast.Module:
    try:
        with open(file, "rb") as stream:
            return ast.parse(stream.read(), file)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {(error.strerror or '').lower()}", f"ls -l {file}") from error
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{file} is no Python: {describe_error(error)}", f"python -m py_compile {file}") from error


def _choose(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements that bind the name and, in turn, the names that those use."""
    wanted, chosen = {name}, set[int]()
    while True:
        more = [
            number
            for number, statement in enumerate(tree.body)
            if number not in chosen
            and not _is_main(statement)
            and (_is_always(statement) or wanted.intersection(_list_bound(statement)))
        ]
        if not more:
            return [tree.body[number] for number in sorted(chosen)]
        chosen |= set(more)
        for number in more:
            names = {node.id for node in ast.walk(tree.body[number]) if isinstance(node, ast.Name)}
            wanted |= names - set(dir(builtins))


def _is_always(statement: ast.stmt) -> bool:
    """`from x import *`, which may bind anything, and `from __future__`."""
    return isinstance(statement, ast.ImportFrom) and (
        statement.module == "__future__" or any(alias.name == "*" for alias in statement.names)
    )


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def _list_bound(node: ast.AST) -> Iterator[str]:
    """The names of the top level that a statement gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    if isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        # CONFIG["width"] = 64 changes CONFIG, which may be needed
        base: ast.AST = node
        while isinstance(base, (ast.Subscript, ast.Attribute)):
            base = base.value
        if isinstance(base, ast.Name):
            yield base.id
    for child in ast.iter_child_nodes(node):
        yield from _list_bound(child)
