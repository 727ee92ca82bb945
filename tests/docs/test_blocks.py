"""Every bash block of the manual runs, and every python block uses names that exist.

Blocks of another language (`text`, `console`) are for reading. In a bash block, what installs, trains or needs a
cluster is replaced by the nearest thing that can be checked in a second: see STAND_INS.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import hpcddp

# Word -> what it does in a block under test. A job script is only parsed: the multirank tests and `make demo` run some.
_PARSE = 'exec /bin/bash -n "${1:-/dev/stdin}"'
STAND_INS = {
    "qsub": _PARSE,
    "sbatch": _PARSE,
    "bash": _PARSE,
    "make": 'exec /usr/bin/make -n -C "$REPO" "$@"',
    "git": '[ "$1" = clone ]',
    "pip": '[ "$1" = install ]',
}


def stand_ins(text: str, folder: Path, repo: Path) -> Path:
    """A folder for PATH with the stand-ins that the block types: a machine with a qsub is another machine to hpcddp."""
    folder.mkdir()
    typed = re.sub(r"(^|\s)#.*", "", text)
    for name, body in STAND_INS.items():
        if re.search(rf"\b{name}\b", typed):
            (folder / name).write_text(f"#!/bin/sh\nREPO='{repo}'\n{body}\n")
            (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def laptop(tmp_path_factory) -> Path:
    """This machine's programs without those of a scheduler, if it has one."""
    folder = tmp_path_factory.mktemp("laptop")
    for program in Path("/usr/bin").iterdir():
        if program.name not in {"qsub", "sbatch", "srun", "salloc"}:
            (folder / program.name).symlink_to(program)
    return folder


def test_a_bash_block_runs(bash_block, laptop, repo, run, tmp_path):
    folder = stand_ins(bash_block.text, tmp_path / "bin", repo)
    (tmp_path / "hpcddp").mkdir()  # what `git clone` would have made
    (tmp_path / "train.py").write_text("print('trained')\n")  # the reader's own script
    path = f"{folder}:{Path(sys.executable).parent}:{laptop}"
    done = run(["/bin/bash", "-euo", "pipefail", "-c", bash_block.text], env={"PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, f"{bash_block.text}\n{done.stdout}\n{done.stderr}"


def test_a_python_block_uses_names_that_exist(python_block):
    tree = ast.parse(python_block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hpcddp"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hpcddp":
            assert hasattr(hpcddp, node.attr), f"hpcddp.{node.attr}"
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and re.match(r"hpcddp\.\w+$", ast.unparse(call.func)):
            signature = inspect.signature(getattr(hpcddp, ast.unparse(call.func).removeprefix("hpcddp.")))
            signature.bind_partial(*call.args, **{word.arg: None for word in call.keywords if word.arg})
