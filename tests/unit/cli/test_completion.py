"""Completion as bash itself does it; the scripts for the other shells have all verbs and options."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.cli.completion import complete
from hpcddp.cli.verbs import VERBS
from hpcddp.script.site_file import site_files

SHELLS = ("bash", "zsh", "fish", "tcsh")
SITES = tuple(site_files({}))
# What is typed -> some of what completes it, and what does not.
TYPED = [
    ("hpcddp ", set(VERBS), {"--nodes"}),
    ("hpcddp ren", {"render"}, {"layout"}),
    ("hpcddp render --site ab", {"abci3"}, {"polaris", "train.py"}),
    ("hpcddp launch --launcher ", {"openmpi", "srun"}, {"train.py"}),
    ("hpcddp completion ", {"bash", "zsh", "fish", "tcsh"}, {"render"}),
    ("hpcddp launch -- hpcddp-test-prog", {"hpcddp-test-program"}, {"--here"}),
]


@pytest.fixture
def script(tmp_path) -> Path:
    """bash's completion script, in a folder with a train.py; every machine with hpcddp has bash."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").touch()
    program = tmp_path / "bin/hpcddp-test-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(complete("bash", SITES) + "\n")
    return tmp_path / "script"


def ask(script: Path, line: str) -> set[str]:
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    text = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_hpcddp;"
    done = subprocess.run(
        ["bash", "-c", f"{text} printf '%s\\n' \"${{COMPREPLY[@]}}\""],
        env={"PATH": f"{script.parent}/bin:/usr/bin:/bin", "HOME": str(script.parent), "LC_ALL": "C.UTF-8"},
        cwd=script.parent / "work",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.stderr, done.stderr
    return set(done.stdout.splitlines())


@pytest.mark.parametrize(("line", "offered", "not_offered"), TYPED)
def test_a_shell_completes_verbs_options_and_values(script, line, offered, not_offered):
    found = ask(script, line)
    assert offered <= found
    assert not not_offered & found


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [("hpcddp render --no-ch", "--no-check"), ("hpcddp lint tra", "train.py")],
)
def test_the_tab_key_completes_in_a_terminal(script, typed, becomes):
    """An interactive shell on a pseudo-terminal, whose user types a line, a tab and `#`, and reads the line."""
    start = ["bash", "--norc", "--noprofile", "-i"]
    load = f"bind 'set enable-bracketed-paste off'; source {script}"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(script.parent), "TERM": "dumb", "PS1": "", "LC_ALL": "C.UTF-8"}
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
