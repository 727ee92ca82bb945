"""Every bash block of the manual runs, every console block shows what its commands print, every python block uses
names that exist.

Blocks of another language (`text`) are for reading. What installs or needs a cluster is replaced by the nearest thing
that can be checked in a second: see STAND_INS. Each block runs in an empty home folder that has the reader's train.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

import hpcddp

# Word -> what it does in a block under test. A job script is only parsed, and the scheduler's answer printed: the
# multirank tests and `make demo` run some.
_PARSE = 'exec /bin/bash -n "${1:-/dev/stdin}"'
_QUEUE = 'text=$(cat "${1:-/dev/stdin}") && echo "$text" | grep -q "^exec " && echo "$text" | /bin/bash -n && echo'
STAND_INS = {
    "qsub": f"{_QUEUE} 47.pbs1",
    "sbatch": f"{_QUEUE} Submitted batch job 47",
    "bash": _PARSE,
    "make": '[ "$1" = help ] || set -- -n "$@"; exec /usr/bin/make --no-print-directory -C "$REPO" "$@"',
    "git": '[ "$1" = clone ]',
    "pip": '[ "$1" = install ]',
}

# What a laptop does not have.
SCHEDULER_PROGRAMS = {
    *("qsub", "qstat", "qdel", "pbsnodes"),
    *("sbatch", "srun", "salloc", "sinfo", "squeue", "scontrol", "scancel", "sacct"),
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
        if program.name not in SCHEDULER_PROGRAMS:
            (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture
def reader(laptop, repo, run, tmp_path):
    """Runs a text in bash as a reader would: in a folder with a train.py, with stand-ins for what the text types."""

    def type_in(text: str, *options: str):
        folder = stand_ins(text, tmp_path / "bin", repo)
        (tmp_path / "hpcddp").mkdir()  # what `git clone` would have made
        for name in ("benchmarks", "jobs"):  # a page that needs a checkout says so
            (tmp_path / name).symlink_to(repo / name)
        (tmp_path / "train.py").write_text("print('trained')\n")  # the reader's own script
        path = f"{folder}:{Path(sys.executable).parent}:{laptop}"
        env = {"PATH": path, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"}
        return run(["/bin/bash", *options, "-c", text], env=env, cwd=tmp_path)

    return type_in


def test_a_bash_block_runs(bash_block, reader):
    done = reader(bash_block.text, "-euo", "pipefail")
    assert done.returncode == 0, f"{bash_block.text}\n{done.stdout}\n{done.stderr}"


def test_a_long_bash_block_asks_its_verb_for_what_that_knows(long_block):
    """In short for such a block, which the long tests run."""
    for line in long_block.text.replace("\\\n", "").splitlines():
        program, verb, *options = shlex.split(line, comments=True)
        assert program == "hpcddp"
        importlib.import_module(f"hpcddp.cli.{verb}").build_parser().parse_args(options)


def typed_and_shown(text: str) -> list[tuple[str, str]]:
    """Each command of a console block and the output below it: `$ ` begins a command, `> ` continues it."""
    pairs: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            pairs.append((line[2:], ""))
        elif line.startswith(">") and not pairs[-1][1]:
            pairs[-1] = (pairs[-1][0] + (line[2:] or "\n"), "")
        else:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + line)
    return pairs


def pattern_of(shown: str) -> str:
    """A regular expression for what is shown.

    A line that is "…" stands for any lines, also none. A "…" inside a line stands for any text; blanks beside other
    blanks do not count in that line, since columns move.
    """
    lines = []
    for line in shown.splitlines():
        part = re.escape(line)
        if "…" in line:
            part = re.sub(r"(\\ )+", " +", part).replace("…", "[^\n]*")
        lines.append(".*" if line == "…" else part)
    return "\n".join(lines).replace("\n.*\n", "\n(?:.*\n)?")


def test_a_page_shows_what_its_commands_print(console, reader):
    pairs = typed_and_shown(console)
    done = reader("exec 2>&1\n" + "".join(f"{typed}printf '\\036'\n" for typed, _ in pairs))
    printed = done.stdout.split("\x1e")[:-1]  # the character behind each command's output
    for (typed, shown), real in zip(pairs, printed, strict=True):
        same = re.fullmatch(pattern_of(shown), real.rstrip("\n"), re.DOTALL)
        assert same, f"\n$ {typed}{real}\n--- the page shows:\n{shown}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a\nb", True),
        ("a\nb\n", "a\nc", False),
        ("a\n…\nd\n", "a\nb\nc\nd", True),
        ("a\n…\nd\n", "a\nd", True),
        ("a\n…\nd\n", "a\nb\nc", False),
        ("a … c\n", "a b c", True),
        ("a … c\n", "a b\nb c", False),
        ("a …   c\n", "a 123 c", True),
        ("a   c\n", "a c", False),
        ("…\nb\n", "a\nb", True),
        ("a\n…\n", "a\nb\nc", True),
        ("1.5 s\n", "105 s", False),
    ],
)
def test_what_is_shown_is_what_is_printed_but_for_the_dots(shown, printed, same):
    assert (re.fullmatch(pattern_of(shown), printed, re.DOTALL) is not None) is same


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
