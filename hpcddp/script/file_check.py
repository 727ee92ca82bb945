"""The mistakes that can be found on the login node, before the job waits in the queue.

A path may exist on the compute nodes only. A missing path is therefore an error only if it is relative, or if the
folder that should hold it is here. Every other missing path is reported, and the script is rendered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise, takewhile

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_commands import COMMANDS
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import JobPlan, find_script

_ANYWAY = "correct the path, or --no-check if it will be there when the job runs"
# Every node has its own: what is missing here may be there.
_NODE_LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/", "/local", "/scratch/local", "/run/")  # noqa: S108  # never written to
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
# A launcher's command in a shell's text.
_INNER = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, sorted(COMMANDS)))})(?=\s)".replace(r"\-m\ ", ""))


def check_plan(plan: JobPlan, path: str) -> list[str]:
    """Remarks on what may be wrong with a job that is submitted from this folder; `path`: what PATH says. Raises
    RequestError for what clearly is wrong."""
    remarks = [*_check_shell_line(plan.command)]
    if plan.spec.container:
        return remarks  # its paths are not this machine's
    here = os.getcwd()
    folder = os.path.join(here, plan.spec.workdir or "")
    workdir = list(_check_path("workdir", plan.spec.workdir, here))
    script = find_script(plan.command)
    remarks += workdir
    if not workdir:
        if not _PYTHON.fullmatch(plan.command[0]):
            remarks += check_program(plan.command[0], folder, plan.python, path)
        remarks += _check_path("the command's script", script, folder)
        for one in plan.spec.pythonpath or ():
            remarks += _check_path("pythonpath", one, folder)
    remarks += _check_path("venv", plan.spec.venv, folder)
    if plan.spec.venv is None or _exists(os.path.join(folder, plan.spec.venv)):
        remarks += _check_path("python", plan.python, folder)
    for key, one in (("run_dir", plan.run_dir), ("stage_dir", plan.spec.stage_dir or "")):
        if (one.startswith("~") or "$" in one) and not _exists(os.path.join(folder, one)):
            what = f"{key} {one!r} has a word that only a shell would replace, and none reads it: it would be a name"
            raise RequestError(what, f"--set {key}=/whole/path, or --no-check")
    return remarks


def check_output(scheduler: str, script: str) -> Iterator[str]:
    """The folders of the job's output in a script for the scheduler of that name: no scheduler makes them."""
    rules = find_scheduler(scheduler).directives
    options = "|".join(f"{option}{'=' if option.startswith('--') else ' '}" for option in rules.outputs)
    output = re.compile(rf"{re.escape(rules.prefix)} (?:{options})(\S+)")
    for line in takewhile(lambda line: line.startswith("#"), script.splitlines()[1:]):
        file = output.match(line) if options else None
        folder = os.path.dirname(file[1]) if file else ""
        if not folder or re.search(r"[%^]", folder) or _exists(folder):
            continue
        if not folder.startswith("/") or _clearly_wrong(folder):
            what = f"the output's folder {folder} does not exist ({line}), and no scheduler makes it"
            raise RequestError(what, f"mkdir -p {folder}")
        yield f"the output's folder {folder} is not on this machine"


def _exists(path: str) -> bool:
    """UnicodeEncodeError for a name that Python cannot encode, with an answer of its own: it would be "not there"."""
    os.fsencode(path)
    return os.path.exists(path)


def _check_path(what: str, path: str | None, folder: str) -> Iterator[str]:
    if not path or _exists(os.path.join(folder, path)):
        return
    if not path.startswith("/"):
        raise RequestError(f"{what} {path!r} is not in {folder}", _ANYWAY)
    if _clearly_wrong(path):
        raise RequestError(f"{what} {path!r} does not exist, though {os.path.dirname(path)} does", _ANYWAY)
    yield f"{what} {path} is not on this machine; the compute nodes must have it"


def _clearly_wrong(path: str) -> bool:
    return _exists(os.path.dirname(path.rstrip("/"))) and not path.startswith(_NODE_LOCAL)


def _check_shell_line(command: tuple[str, ...]) -> Iterator[str]:
    """A second launcher in a shell's line: every rank would start ranks."""
    for option, line in pairwise(command):
        inner = _INNER.search(line)
        if inner and option in {"-c", "-lc"}:
            yield f"the command's shell line starts {inner[1]}: each of the job's ranks will do so"


# ---- can the ranks' program be started


def check_program(program: str, folder: str, python: str, path: str) -> Iterator[str]:
    """Remarks on a program that may be missing. Raises RequestError for one that is here and cannot be started.

    `folder`: where the job runs. `python`: the ranks' interpreter, whose folder is first on the job's PATH.
    `path`: this machine's; "" where it is not known.
    """
    if _exists(os.path.join(folder, program)) and "/" in program:
        if not os.access(os.path.join(folder, program), os.X_OK):
            raise RequestError(f"the command's {program} is not executable", f"chmod +x {program}")
        return
    if " " in program:
        raise RequestError(f"the command is one word, {program!r}: its blanks are quoted", f"-- {program}")
    on_path = [one for one in (os.path.dirname(python), *path.split(":")) if one]
    if "/" in program or not path or any(_exists(os.path.join(one, program)) for one in on_path):
        return
    if program.endswith(".py"):
        raise RequestError(f"the command starts with {program}, which is no program on PATH", f"-- python {program}")
    yield f"{program} is not on this machine's PATH; the compute nodes must have it"
