"""Expressions of Python code: their names, their literals, what is assigned to what."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target and its value; of `a, b = x` each with x."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                yield each, node.value
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def parameters(function: ast.AST) -> set[str]:
    """The names that a function is called with."""
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments):
        return set()
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {a.arg for a in found if a}


def last_word(node: ast.AST) -> str:
    """`DataLoader` of torch.utils.data.DataLoader; "" of what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def word_of(node: ast.AST) -> str:
    """The one word that a node itself holds: a name, an attribute, a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return last_word(node)


def words(node: ast.AST) -> list[str]:
    """Every name, attribute and string in an expression."""
    return [word for inner in ast.walk(node) if (word := word_of(inner))]


def dotted(node: ast.AST) -> str:
    """`self.model` as it is written; "" of an expression. Up to 8 words, so that a long chain costs no more."""
    found: list[str] = []
    while isinstance(node, ast.Attribute) and len(found) < 8:
        found.append(node.attr)
        node = node.value
    return ".".join(reversed([*found, node.id])) if isinstance(node, ast.Name) else ""


def shown(node: ast.AST) -> str:
    """An expression in a message, in short."""
    if isinstance(node, ast.Call):
        return f"{dotted(node.func) or '….' + last_word(node.func)}()"
    return dotted(node) or "…"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def may_have(call: ast.Call, name: str) -> bool:
    """Whether a keyword argument is given, or may be in **options."""
    return any(word.arg in {name, None} for word in call.keywords)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
