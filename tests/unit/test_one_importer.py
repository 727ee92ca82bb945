"""A module that one other module of its folder imports, and nothing else, is a part of that one: it needs a reason.

A file is one idea and its helpers. What is cut off a file only because that is long has to be read with it anyway.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hpcddp

_PART = "a part of Runtime, which is composed of its parts"
#: Module below hpcddp -> why it is a file of its own.
ALLOWED = {
    "api": "loaded at the first use of a name: `import hpcddp` alone costs nothing",
    "cli.launch": "a verb; `hpcddp check` starts processes as it does",
    "cli.watch_screen": "needs rich, which may be missing",
    "integrations.plain_loop": "one file for each kind of loop, loaded at its first use",
    "lint.header_rules": "one file for each kind of rule; the table of all is rules.py",
    "lint.python_rules": "one file for each kind of rule; the table of all is rules.py",
    "lint.run_rules": "one file for each kind of rule; the table of all is rules.py",
    "ranks.slurm_step": "what Slurm's step needs beyond its row",
    "supervisor.recovery": "loaded by jobs that may start their ranks again (max_restarts), and no others",
    "supervisor.usage": "loaded by the agent of one rank on each node, once that has started",
    "training.epochs": _PART,
    "training.data.stream": "data without an index; loader.py has what all data have in common",
    "training.prepare": _PART,
}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What an import can be: `ast.walk` takes ten times as long, since most of a tree is expressions."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
            yield from statements(child)


def find_single_importers(package: Path) -> dict[str, str]:
    """Modules below the package that one module alone imports, and that one is in the same folder. By name: who."""
    modules = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    importers = defaultdict(set)
    for name, path in modules.items():
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in {*named} & modules.keys() - {name}:
                importers[module].add(name)
    return {
        module.partition(".")[2]: importer
        for module, (importer, *others) in importers.items()
        if not others and modules[module].name != "__init__.py" and modules[module].parent == modules[importer].parent
    }


def test_a_module_with_one_importer_in_its_own_folder_has_a_reason_and_no_reason_is_left_of_another():
    found = find_single_importers(Path(hpcddp.__file__).parent)
    assert {module: found[module] for module in sorted(found.keys() - ALLOWED.keys())} == {}, "fold it, or say why not"
    assert ALLOWED.keys() <= found.keys()
    assert len(ALLOWED) <= 15


def test_an_importer_in_another_folder_or_a_second_one_is_enough(tmp_path: Path):
    package = tmp_path / "p"
    for file, text in {
        "__init__.py": "",
        "a.py": "from p import b, c\nfrom p.r import d",
        "b.py": "",
        "c.py": "",
        "r/__init__.py": "",
        "r/d.py": "def late():\n    import p.c",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    assert find_single_importers(package) == {"b": "p.a"}
