"""The mistakes that can be found on the login node, before the job waits in the queue.

A path may exist on the compute nodes only. A missing path is therefore an error only if it is relative, or if the
folder that should hold it is here. Every other missing path is reported, and the script is rendered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile

from hpcddp.errors import RequestError, nearest
from hpcddp.ranks.launch_commands import COMMANDS
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import JobPlan, find_script

_ANYWAY = "correct the path, or --no-check if it will be there when the job runs"
# Every node has its own: what is missing here may be there.
_NODE_LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/", "/local", "/scratch/local", "/run/")  # noqa: S108  # never written to
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
# A launcher's command in a shell's text.
_INNER = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, sorted(COMMANDS)))})(?=\s)".replace(r"\-m\ ", ""))


class Here(Record):
    """This machine: the folder that the job is submitted from, which paths exist, which files can be executed and what
    they begin with, the names in a folder (none if it cannot be read), and the folders of PATH (none: unknown)."""

    folder: str
    exists: Callable[[str], bool]
    can_run: Callable[[str], bool] = lambda _path: True
    start_of: Callable[[str], bytes] = lambda _path: b"#!"
    names: Callable[[str], Sequence[str]] = lambda _folder: ()
    path: tuple[str, ...] = ()


def check_plan(plan: JobPlan, here: Here) -> list[str]:
    """Remarks on what may be wrong. Raises RequestError for what clearly is."""
    remarks = [*_check_shell_line(plan.command)]
    if plan.spec.container:
        return remarks  # its paths are not this machine's
    folder = os.path.join(here.folder, plan.spec.workdir) if plan.spec.workdir else here.folder
    workdir = list(_check_path("workdir", plan.spec.workdir, here.folder, here))
    script = find_script(plan.command)
    remarks += workdir
    if not workdir:
        if not _PYTHON.fullmatch(plan.command[0]):
            remarks += check_program(plan.command[0], folder, plan.python, here)
        remarks += _check_path("the command's script", script, folder, here)
        for path in plan.spec.pythonpath or ():
            remarks += _check_path("pythonpath", path, folder, here)
    remarks += _check_path("venv", plan.spec.venv, folder, here)
    if plan.spec.venv is None or here.exists(plan.spec.venv):
        remarks += _check_path("python", plan.python, folder, here)
    for key, path in (("run_dir", plan.run_dir), ("stage_dir", plan.spec.stage_dir or "")):
        if (path.startswith("~") or "$" in path) and not here.exists(os.path.join(folder, path)):
            what = f"{key} {path!r} has a word that only a shell would replace, and none reads it: it would be a name"
            raise RequestError(what, f"--set {key}=/whole/path, or --no-check")
    return remarks


def check_output(scheduler: str, script: str, here: Here) -> Iterator[str]:
    """The folders of the job's output in a script for the scheduler of that name: no scheduler makes them."""
    rules = find_scheduler(scheduler).directives
    options = "|".join(f"{option}{'=' if option.startswith('--') else ' '}" for option in rules.outputs)
    output = re.compile(rf"{re.escape(rules.prefix)} (?:{options})(\S+)")
    for line in takewhile(lambda line: line.startswith("#"), script.splitlines()[1:]):
        file = output.match(line) if options else None
        folder = os.path.dirname(file[1]) if file else ""
        if not folder or re.search(r"[%^]", folder) or here.exists(os.path.join(here.folder, folder)):
            continue
        if not folder.startswith("/") or _clearly_wrong(folder, here):
            what = f"the output's folder {folder} does not exist ({line}), and no scheduler makes it"
            raise RequestError(what, f"mkdir -p {folder}")
        yield f"the output's folder {folder} is not on this machine"


def _check_path(what: str, path: str | None, folder: str, here: Here) -> Iterator[str]:
    if not path or here.exists(os.path.join(folder, path)):
        return
    if not path.startswith("/"):
        raise RequestError(f"{what} {path!r} is not in {folder}", _ANYWAY)
    if _clearly_wrong(path, here):
        raise RequestError(f"{what} {path!r} does not exist, though {os.path.dirname(path)} does", _ANYWAY)
    yield f"{what} {path} is not on this machine; the compute nodes must have it"


def _clearly_wrong(path: str, here: Here) -> bool:
    return here.exists(os.path.dirname(path.rstrip("/"))) and not path.startswith(_NODE_LOCAL)


def _check_shell_line(command: tuple[str, ...]) -> Iterator[str]:
    """A second launcher in a shell's line: every rank would start ranks."""
    for option, line in pairwise(command):
        inner = _INNER.search(line)
        if inner and option in {"-c", "-lc"}:
            yield f"the command's shell line starts {inner[1]}: each of the job's ranks will do so"


# Whether the program that each rank becomes can be started at all, as far as this machine can tell.


# Which interpreter a file without its own is for.
_INTERPRETERS = {".py": "python", ".sh": "bash"}
_STARTS = (b"#!", b"\x7fELF")


def check_program(program: str, folder: str, python: str, here: Here) -> Iterator[str]:
    """Remarks on a program that may be missing. Raises RequestError for one that is here and cannot be started.

    `folder`: where the job runs. `python`: the ranks' interpreter, whose folder is first on the job's PATH.
    """
    first = program.partition(" ")[0]
    is_program = any(here.exists(os.path.join(one, first)) for one in (folder, *here.path))
    if first != program and is_program and not here.exists(os.path.join(folder, program)):
        raise RequestError(f"the command is one word, {program!r}: its blanks are quoted", f"-- {program}")
    if "/" in program:
        path = os.path.join(folder, program)
        if here.exists(path):
            _check_file(program, path, here)
        return
    folders = [*([os.path.dirname(python)] if python else []), *here.path]
    if not here.path or any(here.exists(os.path.join(one, program)) for one in folders):
        return
    interpreter = _INTERPRETERS.get(os.path.splitext(program)[1])
    if interpreter:
        what = f"the command starts with {program}, which is no program on PATH"
        raise RequestError(what, f"-- {interpreter} {program}")
    if here.exists(os.path.join(folder, program)):
        raise RequestError(f"the command's {program} is in {folder}, but not on PATH", f"-- ./{program}")
    guess = nearest(program, sorted({name for one in folders for name in here.names(one)}))
    yield f"{program} is not on this machine's PATH{guess}; the compute nodes must have it"


def _check_file(program: str, path: str, here: Here) -> None:
    """A file that is here: `exec` refuses one that is not executable, and one that names no interpreter."""
    interpreter = _INTERPRETERS.get(os.path.splitext(program)[1])
    instead = f"-- {interpreter} {program}" if interpreter else f"file {program}"
    if not here.can_run(path):
        raise RequestError(f"the command's {program} is not executable", f"chmod +x {program}, or {instead}")
    if not here.start_of(path).startswith(_STARTS):
        raise RequestError(f"the command's {program} has no #! line, so the system cannot start it", instead)
