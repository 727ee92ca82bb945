"""A public name stands for one thing in the whole package: a reader who has met it once knows it everywhere."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hpcddp

#: A name that several modules have because they are used alike, through one table -> where they are.
PROTOCOLS = {
    "attach": "integrations",
    "build_parser": "cli",
    "find_hosts": "schedulers",
    "parse_job": "schedulers",
    "parse_jobs": "schedulers",
    "run": "cli",
}


def find_places(package: Path) -> dict[str, list[str]]:
    """Where each public class and function of the modules' top level stands."""
    places = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(package).as_posix())
    return places


def test_no_public_name_has_two_meanings():
    places = find_places(Path(hpcddp.__file__).parent)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in PROTOCOLS} == {}
    for name, folder in PROTOCOLS.items():
        assert {file.split("/")[0] for file in twice[name]} == {folder}
