"""The request of a script, in one vocabulary for PBS and Slurm. None: the script does not say it, or not plainly."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.lint.directives import Option, ScriptDirectives, chunks
from hpcddp.schedulers.registry import find_scheduler

# Options of Slurm that count GPUs; --gres beside them counts other things, too.
_GPU_COUNTS = tuple(name for name in find_scheduler("slurm").directives.gpu_counts if name != "--gres")


class Request(NamedTuple):
    """Counts per node are the first chunk's. `slots` are the processes per node that the scheduler tells a launcher."""

    nodes: int | None = None
    slots: int | None = None
    cpus_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    size: Option | None = None
    queue: Option | None = None
    walltime: Option | None = None
    account: Option | None = None


def parse_request(found: ScriptDirectives) -> Request:
    """The request in one scheduler's directives."""
    return _pbs(found) if found.scheduler == "pbs" else _slurm(found)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and text.isascii() else None


def _share(total: int | None, parts: int | None) -> int | None:
    return total // parts if total is not None and parts and total % parts == 0 else None


def _times(a: int | None, b: int | None) -> int | None:
    return a * b if a is not None and b is not None else None


def _pbs(found: ScriptDirectives) -> Request:
    select, torque = found.get("-l select"), found.get("-l nodes")
    common = Request(
        queue=found.get("-q"),
        walltime=found.get("-l walltime"),
        account=found.get("-P", "-A") or found.get("-W group_list"),
        size=select or torque,
    )
    if select:
        parts = chunks(select.value)
        first = parts[0][1] if parts else {}
        return common._replace(
            nodes=sum(count for count, _ in parts) or None,
            slots=_number(first.get("mpiprocs")),
            cpus_per_node=_number(first.get("ncpus")),
            gpus_per_node=_number(first.get("ngpus")),
        )
    if torque:
        parts_of = [part.split(":") for part in torque.value.partition("#")[0].split("+")]
        first = {w.partition("=")[0]: w.partition("=")[2] for w in parts_of[0][1:]}
        return common._replace(
            nodes=sum(_number(words[0]) or 1 for words in parts_of),
            slots=_number(first.get("ppn")),
            gpus_per_node=_number(first.get("gpus")),
        )
    cpus, gpus = found.get("-l ncpus"), found.get("-l ngpus")  # the totals of a job on one node
    return common._replace(
        cpus_per_node=_number(cpus.value if cpus else None), gpus_per_node=_number(gpus.value if gpus else None)
    )


def _count_gpus(text: str) -> int | None:
    """The number of GPUs that `a100:4`, `4` or `a100` (one) asks for."""
    last = text.partition("(")[0].split(":")[-1]
    return _number(last) if last.isdecimal() else 1


def _slurm(found: ScriptDirectives) -> Request:
    """Slurm's own arithmetic: what is missing follows from the rest."""

    def value(*names: str) -> str | None:
        option = found.get(*names)
        return option.value if option else None

    gres = next((w.partition(":")[2] for w in (value("--gres") or "").split(",") if w.partition(":")[0] == "gpu"), None)
    number = {name: _count_gpus(text) for name in _GPU_COUNTS if (text := value(name)) is not None}
    if gres is not None:
        number["--gres"] = _count_gpus(gres or "1")
    nodes = _number((value("--nodes") or "").partition("-")[0])
    ranks, slots = _number(value("--ntasks")), _number(value("--ntasks-per-node"))
    ranks = ranks or _times(_number(value("--ntasks-per-gpu")), number.get("--gpus"))
    gpus = number.get("--gpus-per-node", number.get("--gres", _share(number.get("--gpus"), nodes)))
    if slots is None and gpus is not None:
        slots = _times(_number(value("--ntasks-per-gpu")), gpus)
    if slots is None and ranks:
        slots = _share(ranks, nodes)
    if slots is None and gpus is not None and number.get("--gpus-per-task"):
        slots = _share(gpus, number["--gpus-per-task"])
    if gpus is None:
        gpus = _times(number.get("--gpus-per-task"), slots)
    threads, per_gpu = _number(value("--cpus-per-task")), _number(value("--cpus-per-gpu"))
    return Request(
        nodes=nodes,
        slots=slots,
        cpus_per_node=_times(threads, slots) or _times(per_gpu, gpus),
        cpus_per_task=threads,
        gpus_per_node=gpus,
        size=found.get("--nodes"),
        queue=found.get("--partition"),
        walltime=found.get("--time"),
        account=found.get("--account"),
    )
