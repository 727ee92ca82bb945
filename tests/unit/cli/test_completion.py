"""Completion as the shells themselves do it; each is skipped where its shell is not installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.cli.completion import complete
from hpcddp.cli.main import VERBS
from hpcddp.script.site_file import site_files

SHELLS = ("bash", "zsh", "fish", "tcsh")
SITES = tuple(site_files({}))
# What is typed -> some of what completes it, and what does not.
TYPED = [
    ("hpcddp ", set(VERBS), {"--nodes"}),
    ("hpcddp ren", {"render"}, {"layout"}),
    ("hpcddp render --s", {"--site", "--set"}, {"--nodes"}),
    ("hpcddp render --site ab", {"abci3"}, {"polaris", "train.py"}),
    ("hpcddp launch --launcher ", {"openmpi", "srun"}, {"train.py"}),
    ("hpcddp train --exact t", {"tree"}, {"integer"}),
    ("hpcddp sites ", {"show", "new", "check"}, {"train.py"}),
    ("hpcddp help la", {"layout", "launch"}, {"render"}),
    ("hpcddp completion ", {"bash", "zsh", "fish", "tcsh"}, {"render"}),
    ("hpcddp launch -- hpcddp-test-prog", {"hpcddp-test-program"}, {"--here"}),
]


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path) -> tuple[str, Path]:
    """A shell that is installed, and its completion script in a folder with a train.py."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").touch()
    program = tmp_path / "bin/hpcddp-test-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(complete(request.param, SITES) + "\n")
    return request.param, script


def ask(shell: tuple[str, Path], line: str) -> set[str]:
    name, script = shell
    if name in {"zsh", "tcsh"}:
        pytest.skip(f"{name} completes in its line editor only: see the test of a terminal")
    path = f"{script.parent}/bin:/usr/bin:/bin"
    if name == "fish":
        text = f"source {script}; complete -C '{line}'"
    else:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        text = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_hpcddp;"
            ' printf "%s\\n" "${COMPREPLY[@]}"'
        )
    done = subprocess.run(
        [name, "-c", text],
        env={"PATH": path, "HOME": str(script.parent), "LC_ALL": "C.UTF-8"},
        cwd=script.parent / "work",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.stderr, done.stderr
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("line", "offered", "not_offered"), TYPED)
def test_a_shell_completes_verbs_options_and_values(shell, line, offered, not_offered):
    found = ask(shell, line)
    assert offered <= found
    assert not not_offered & found


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [("hpcddp ren", "render"), ("hpcddp render --expl", "--explain"), ("hpcddp lint tra", "train.py")],
)
def test_the_tab_key_completes_in_a_terminal(shell, typed, becomes):
    """An interactive shell on a pseudo-terminal, whose user types a line, a tab and `#`, and reads the line."""
    name, script = shell
    start = {
        "bash": ["bash", "--norc", "--noprofile", "-i"],
        "zsh": ["zsh", "-f", "-i"],
        "fish": ["fish", "--no-config", "-i"],
        "tcsh": ["tcsh", "-f", "-i"],
    }[name]
    if name == "fish":
        pytest.skip("fish asks its terminal for more than a pseudo-terminal answers; complete -C is its own completion")
    load = {
        "bash": f"bind 'set enable-bracketed-paste off'; source {script}",
        "zsh": f'autoload -Uz compinit; compinit -u -D; eval "$(cat {script})"',
        "tcsh": f"source {script}",
    }[name]
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(script.parent),
        "TERM": "vt100" if name == "tcsh" else "dumb",
        "PS1": "",
        "LC_ALL": "C.UTF-8",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(script.parent / "work")
        os.execvpe(start[0], start, env)
    try:
        os.write(terminal, f"{load}; echo REA''DY\n".encode())
        read_until(terminal, "READY")
        os.write(terminal, f"{typed}\t".encode())
        assert becomes in read_until(terminal, becomes)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, wanted: str, limit_s: float = 600) -> str:
    """What the terminal shows until `wanted` stands there. An event is waited for, under a generous limit."""
    shown, end = "", time.monotonic() + limit_s
    while wanted not in shown.replace("\r", "").replace("\b", ""):
        ready, _, _ = select.select([terminal], [], [], max(end - time.monotonic(), 0))
        assert ready, f"{wanted!r} never came: {shown!r}"
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


@pytest.mark.parametrize("name", SHELLS)
def test_every_verb_and_option_is_in_every_script(name):
    text = complete(name, SITES)
    for verb in VERBS:
        assert verb in text
        for action in importlib.import_module(f"hpcddp.cli.{verb}").build_parser()._get_optional_actions():
            for option in action.option_strings:
                assert option.lstrip("-") in text, (verb, option)


def test_the_verb_prints_the_script_for_the_sites_there_are(run, tmp_path):
    (tmp_path / ".config/hpcddp/sites").mkdir(parents=True)
    (tmp_path / ".config/hpcddp/sites/mine.yaml").touch()
    done = run([sys.executable, "-m", "hpcddp", "completion", "bash"], env={"HOME": str(tmp_path)})
    assert done.returncode == 0
    assert " mine" in done.stdout
    assert run([sys.executable, "-m", "hpcddp", "completion", "csh"]).returncode == 2
