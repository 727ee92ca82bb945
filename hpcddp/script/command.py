"""What runs in each rank: the command, and the variables it gets."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_commands import ask_for, find_launch_command
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.rankinfo import NUMBERS
from hpcddp.runs.command import identify_command
from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

_SHELLS = {"bash", "dash", "ksh", "sh", "zsh"}
# Commands of a shell that are no programs, or do nothing as one: each rank would end at once.
_OF_SHELL = {
    *(
        ".",
        "alias",
        "cd",
        "declare",
        "eval",
        "exec",
        "export",
        "for",
        "if",
        "module",
        "set",
        "source",
        "trap",
        "ulimit",
    ),
    *("umask", "unset", "while", "{"),
}
_ANSWERS = {"-V", "-VV", "--version", "-h", "-?", "--help", "--help-env", "--help-xoptions", "--help-all"}  # of python
_SEPARATOR = ":"  # of programs, in the command line of every launcher that is no agent
# Set by the script, the launchers and hpcddp exec: a job's own value would be lost, or would break the ranks.
_OWN = {*(getattr(LAUNCHERS["env"], number) for number in NUMBERS), "MASTER_PORT"}
_OWN_PREFIXES = ("HPCDDP_", *(prefix for row in LAUNCHERS.values() for prefix in row.own_prefixes))


def plan_command(spec: JobSpec, own_ranks: str) -> tuple[str, ...]:
    """The words that each rank runs.

    `own_ranks` is what makes the ranks in place of the job's launcher, "" if that does.
    """
    command = spec.command or ()
    _refuse_nothing(command)
    found = find_launch_command(command)
    if found is not None and found[1] != own_ranks:  # N times N ranks
        raise RequestError(
            f"the command starts its own ranks with {found[1]}, under a launcher that makes one per rank already",
            ask_for(found[1]),
        )
    return command


def find_script(command: tuple[str, ...]) -> str | None:
    """The file that the command runs: what python or a shell is given first, or a program with its path."""
    program = command[0]
    if not re.fullmatch(r"(.*/)?(python[\d.]*|bash|sh)", program):
        return program if "/" in program else None
    words = iter(command[1:])
    for word in words:
        if word in {"-c", "-m"}:
            return None
        if word in {"-W", "-X", "-o"}:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def plan_variables(spec: JobSpec, site: Site) -> tuple[tuple[str, str], ...]:
    """The site's variables, then the job's, which win."""
    for name in spec.env or ():
        instead = {"PYTHONPATH": "use pythonpath: [FOLDER]", "PATH": "use python: or venv:"}.get(name)
        if name in _OWN or name.startswith((*_OWN_PREFIXES, *_scheduler_prefixes())) or instead:
            raise RequestError(f"env {name} is set by the job script itself", instead or f"leave {name} out of env")
    return tuple({**site.env, **(spec.env or {})}.items())


def check_separator(words: Iterable[str], launcher: str) -> None:
    """RequestError for a word that ends one program's arguments: what follows would be run as another program."""
    if launcher and _SEPARATOR in words:
        raise RequestError(
            f"an argument is {_SEPARATOR!r} alone, with which {launcher} begins another program: no program can get it",
            "put the command into a script: -- bash train.sh",
        )


def _refuse_nothing(command: tuple[str, ...]) -> None:
    """RequestError for a command that is no program, or an interpreter that would read its program from the ranks'
    empty standard input, and end with 0."""
    if not command:
        return
    if not command[0].strip():
        raise RequestError(f"the command begins with an empty word, {command[0]!r}", "-- python train.py")
    if "\n" in command[0]:
        raise RequestError(
            f"the command's program is {command[0]!r}, with a line break", "for a shell's lines: -- bash -c '…'"
        )
    if command[0] in _OF_SHELL:
        what = f"the command begins with {command[0]!r}, a shell's own word, and no shell reads it"
        raise RequestError(what, "-- bash -c '…' for a shell's line; env: and modules: of the job file go before it")
    if re.match(r"[A-Za-z_]\w*=", command[0], re.ASCII):
        what = f"the command begins with {command[0]!r}, and no shell reads it as a variable"
        raise RequestError(what, f"--set {shlex.quote(f'env.{command[0]}')}")
    program = os.path.basename(command[0])
    known = identify_command(command)
    if known in (("python",), ("python", "-")) and not _ANSWERS & {*command}:
        raise RequestError(f"the command is {shlex.join(command)}, without a program for it", "-- python train.py")
    if program in _SHELLS and known[1:] in ((), ("-",)):
        raise RequestError(f"the command is {shlex.join(command)}, without a script for it", f"-- {program} train.sh")


def _scheduler_prefixes() -> Iterator[str]:
    """Of the schedulers' variables. Those without a prefix, such as JOB_ID, may be a program's own as well."""
    names = (name for row in scripted_schedulers() for name in row.variables.prefixes)
    return (name for name in names if name.endswith("_"))
