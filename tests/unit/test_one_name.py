"""A public name stands for one thing in the whole package: a reader who has met it once knows it everywhere."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hpcddp

#: A name that several modules have because they are used alike, through one table -> where they are.
PROTOCOLS = {
    "FRAMEWORK": "integrations",
    "SCHEDULER": "schedulers",
    "attach": "integrations",
    "build_parser": "cli",
    "parse_jobs": "schedulers",
    "run": "cli",
}


def list_names(node: ast.stmt, file: str) -> Iterator[tuple[str, str]]:
    """Each name that this statement of a module gives, and its meaning: of a class or function the file, of a constant
    the value, so that one that two modules spell alike, such as TYPE_CHECKING = False, has one meaning."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name, file
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple):
                several = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(target.elts)
                yield from zip(map(ast.unparse, target.elts), map(ast.unparse, several), strict=True)
            else:
                yield ast.unparse(target), ast.unparse(node.value)


def find_places(package: Path) -> dict[str, dict[str, str]]:
    """Where each public class, function and constant of the modules' top level stands: file -> meaning."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name, meaning in list_names(node, file):
                if name.isidentifier() and not name.startswith("_"):
                    places[name][file] = meaning
    return places


def test_no_public_name_has_two_meanings():
    places = find_places(Path(hpcddp.__file__).parent)
    twice = {name: set(where) for name, where in places.items() if len(set(where.values())) > 1}
    assert {name: files for name, files in twice.items() if name not in PROTOCOLS} == {}
    for name, folder in PROTOCOLS.items():
        assert {file.split("/")[0] for file in twice[name]} == {folder}
