"""What can be seen to be wrong on the login node, before a job waits and then fails in its first second.

A path that only the compute nodes have is right; so a missing one is an error only where it is clearly wrong: where it
is relative, or where the folder that should hold it is here. Everything else is told, and rendered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hpcddp.errors import RequestError
from hpcddp.script.plan import JobPlan

_ANYWAY = "correct the path, or --no-check if it will be there when the job runs"
# Every node has its own: what is missing here may be there.
_NODE_LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/", "/local", "/scratch/local", "/run/")  # noqa: S108  # never written to
_STARTERS = {
    "torchrun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "srun",
    "aprun",
    "jsrun",
    "ibrun",
    "deepspeed",
    "orterun",
}
_OUTPUT = re.compile(r"#(?:PBS -[oe] |SBATCH --(?:output|error)=|\$ -[oe] )(\S+)")


class Here(NamedTuple):
    """This machine: the folder that the job is submitted from, and which paths exist."""

    folder: str
    exists: Callable[[str], bool]


def check_plan(plan: JobPlan, here: Here) -> list[str]:
    """Remarks on what may be wrong. Raises RequestError for what clearly is."""
    remarks = [*_check_starters(plan.command), *_check_cpus(plan)]
    if plan.spec.container:
        return remarks  # its paths are not this machine's
    folder = os.path.join(here.folder, plan.spec.workdir or "")
    workdir = list(_check_path("workdir", plan.spec.workdir, here.folder, here))
    script = _script(plan.command)
    remarks += workdir
    if not workdir:
        remarks += _check_path("the command's script", script, folder, here)
        for path in plan.spec.pythonpath or ():
            remarks += _check_path("pythonpath", path, folder, here)
    remarks += _check_path("venv", plan.spec.venv, folder, here)
    if plan.spec.venv is None or here.exists(plan.spec.venv):
        remarks += _check_path("python", plan.python, folder, here)
    return remarks


def check_output(script: str, here: Here) -> list[str]:
    """The folders of the job's output in a rendered script: no scheduler makes them."""
    remarks: list[str] = []
    for line in script.splitlines()[1:]:
        if not line.startswith("#"):
            break
        found = _OUTPUT.match(line)
        folder = os.path.dirname(found[1]) if found else ""
        if folder and not re.search(r"[%^]", folder) and not here.exists(os.path.join(here.folder, folder)):
            if not folder.startswith("/") or _clearly_wrong(folder, here):
                raise RequestError(
                    f"the output's folder {folder} does not exist ({line}), and no scheduler makes it",
                    f"mkdir -p {folder}",
                )
            remarks.append(f"the output's folder {folder} is not on this machine")
    return remarks


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


def _script(command: tuple[str, ...]) -> str | None:
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


def _check_starters(command: tuple[str, ...]) -> Iterator[str]:
    """A second launcher behind `env`, `numactl` or a shell: every rank would start ranks."""
    for i, word in enumerate(command):
        if word.endswith(".py") and " " not in word:
            return
        name = word.rsplit("/", 1)[-1]
        if name in _STARTERS or (name == "accelerate" and command[i + 1 : i + 2] == ("launch",)):
            raise RequestError(
                f"the command starts its own ranks with {name}, and each of the job's ranks would do so",
                "give the training script itself: -- python train.py (--launcher torchrun has torchrun start it)",
            )
        inner = re.search(r"(?<![\w./-])(torchrun|mpirun|mpiexec|srun|torch\.distributed\.run)(?=\s)", word)
        if inner and command[i - 1 : i] in {("-c",), ("-lc",)}:
            yield f"the command's shell line starts {inner[1]}: each of the job's ranks will do so"


def _check_cpus(plan: JobPlan) -> Iterator[str]:
    wanted = plan.cpus_per_rank * plan.ranks_per_node
    if plan.site.scheduler == "local" and wanted > plan.origin.cpus:
        yield f"{plan.ranks_per_node} ranks share this machine's {plan.origin.cpus} CPUs"
    threads = dict(plan.env).get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > plan.threads_per_rank:
        yield f"OMP_NUM_THREADS={threads} in env is more than the {plan.threads_per_rank} cores of each rank"
