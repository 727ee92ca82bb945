"""What a script asks for, in one vocabulary for the three schedulers. None is what it does not say, or not plainly."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.lint.directives import Option, ScriptDirectives, chunks
from hpcddp.schedulers.registry import find_scheduler

#: Options of Slurm that count GPUs; --gres beside them counts other things, too.
GPU_COUNTS = tuple(name for name in find_scheduler("slurm").directives.gpu_counts if name != "--gres")
# TSUBAME's and ABCI 2.0's resource types, whose value is a number of nodes or of parts of one.
_NODE_TYPES = re.compile(r"-l (node_[fhqo]|cpu_\d+|gpu_[1h]|rt_[A-Z]\w*(\.\w+)?)")


class Request(NamedTuple):
    """Counts per node are the first chunk's. `slots` are the processes per node that the scheduler tells a launcher.

    `gpu_type` is "" where none is named, `mem_mb` each node's memory, `one_size` False for chunks that differ.
    """

    nodes: int | None = None
    slots: int | None = None
    ranks: int | None = None
    cpus_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str = ""
    mem_mb: int | None = None
    one_size: bool = True
    size: Option | None = None
    queue: Option | None = None
    walltime: Option | None = None
    account: Option | None = None


def read_request(found: ScriptDirectives) -> Request:
    """The request in one scheduler's directives."""
    return {"pbs": _pbs, "slurm": _slurm, "gridengine": _gridengine}[found.scheduler](found)


def read_seconds(text: str, scheduler: str) -> int | None:
    """A run time as the scheduler reads it: a bare number is minutes to Slurm and seconds to the others."""
    days, dash, clock = text.strip().rpartition("-")
    fields = clock.removesuffix(":").partition(".")[0].split(":")
    most = 2 if dash and scheduler != "slurm" else 3
    if not all(re.fullmatch(r"\d{1,9}", field, re.ASCII) for field in fields) or len(fields) > most:
        return None
    numbers = [int(field) for field in fields]
    if dash:  # days-hours:minutes:seconds
        if scheduler != "slurm" or not days.isdecimal():
            return None
        numbers = [*numbers, 0, 0][:3]
        return int(days) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if scheduler == "slurm" and len(numbers) == 1:
        numbers.append(0)
    total = 0
    for number in numbers:
        total = total * 60 + number
    return total


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and text.isascii() else None


def _share(total: int | None, parts: int | None) -> int | None:
    return total // parts if total is not None and parts and total % parts == 0 else None


def _times(a: int | None, b: int | None) -> int | None:
    return a * b if a is not None and b is not None else None


def _size_mb(text: str | None, default: str) -> int | None:
    """Memory in MB: `32G`, `32gb`, `4096` in the scheduler's own unit; None for 0, which is all of it."""
    found = re.fullmatch(r"(\d{1,15})([kmgtp]?)[bw]?", text or "", re.ASCII | re.IGNORECASE)
    if not found or not int(found[1]):
        return None
    power = "bkmgtp".index(found[2].lower() or default) - 2
    size = int(found[1])
    for _ in range(power):
        size *= 1024
    return size if power >= 0 else size // (1024 if power == -1 else 1024**2)


def _pbs(found: ScriptDirectives) -> Request:
    def value(name: str) -> str | None:
        option = found.get(name)
        return option.value if option else None

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
            gpu_type=next((v for k, v in first.items() if k in {"gpu_model", "gpu_type", "gputype"}), ""),
            mem_mb=_size_mb(first.get("mem"), "b"),
            one_size=all(chunk == first for _, chunk in parts),
        )
    if torque:
        parts_of = [part.split(":") for part in torque.value.partition("#")[0].split("+")]
        sizes = [{w.partition("=")[0]: w.partition("=")[2] for w in words[1:]} for words in parts_of]
        return common._replace(
            nodes=sum(_number(words[0]) or 1 for words in parts_of),
            slots=_number(sizes[0].get("ppn")),
            gpus_per_node=_number(sizes[0].get("gpus")),
            one_size=all(size == sizes[0] for size in sizes),
        )
    return common._replace(  # the totals of a job on one node
        cpus_per_node=_number(value("-l ncpus")),
        gpus_per_node=_number(value("-l ngpus")),
        mem_mb=_size_mb(value("-l mem"), "b"),
    )


def count_gpus(text: str) -> tuple[str, int | None]:
    """Type and number of `a100:4`, `4` or `a100`."""
    words = text.partition("(")[0].split(":")
    number = _number(words[-1])
    return ":".join(words if number is None else words[:-1]), 1 if number is None else number


def _slurm(found: ScriptDirectives) -> Request:
    """Slurm's own arithmetic: what is not said follows from what is."""

    def value(*names: str) -> str | None:
        option = found.get(*names)
        return option.value if option else None

    gres = next((w.partition(":")[2] for w in (value("--gres") or "").split(",") if w.partition(":")[0] == "gpu"), None)
    counts = {name: count_gpus(said) for name in GPU_COUNTS if (said := value(name)) is not None}
    if gres is not None:
        counts["--gres"] = count_gpus(gres or "1")
    number = {name: count for name, (_, count) in counts.items()}
    nodes = _number((value("--nodes") or "").partition("-")[0])
    ranks, slots = _number(value("--ntasks")), _number(value("--ntasks-per-node"))
    ranks = ranks or _times(_number(value("--ntasks-per-gpu")), number.get("--gpus"))
    of_sockets = _times(number.get("--gpus-per-socket"), _number(value("--sockets-per-node")))
    gpus = number.get("--gpus-per-node", number.get("--gres", _share(number.get("--gpus"), nodes) or of_sockets))
    if slots is None and gpus is not None:
        slots = _times(_number(value("--ntasks-per-gpu")), gpus)
    if slots is None and ranks:
        slots = _share(ranks, nodes)
    if slots is None and gpus is not None and number.get("--gpus-per-task"):
        slots = _share(gpus, number["--gpus-per-task"])
    if gpus is None:
        gpus = _times(number.get("--gpus-per-task"), slots)
    threads, per_gpu = _number(value("--cpus-per-task")), _number(value("--cpus-per-gpu"))
    cpus = _times(threads, slots) or _times(per_gpu, gpus)
    mem_mb = _size_mb(value("--mem"), "m")
    if mem_mb is None and value("--mem") is None:
        mem_mb = _times(_size_mb(value("--mem-per-cpu"), "m"), cpus) or _times(
            _size_mb(value("--mem-per-gpu"), "m"), gpus
        )
    return Request(
        nodes=nodes,
        slots=slots,
        ranks=ranks or (nodes * slots if nodes and slots else None),
        cpus_per_node=cpus,
        cpus_per_task=threads,
        gpus_per_node=gpus,
        gpu_type=next((kind for kind, _ in counts.values() if kind), ""),
        mem_mb=mem_mb,
        size=found.get("--nodes"),
        queue=found.get("--partition"),
        walltime=found.get("--time"),
        account=found.get("--account"),
    )


def _gridengine(found: ScriptDirectives) -> Request:
    size = next((o for o in found.options if _NODE_TYPES.fullmatch(o.name)), None)
    whole = size is not None and size.name in {"-l node_f", "-l rt_F"}
    slots = next((o.value for o in found.options if o.name.startswith("-pe ")), None)
    return Request(
        ranks=_number(slots),
        nodes=_number(size.value) if whole and size else None,
        size=size,
        queue=found.get("-q"),
        walltime=found.get("-l h_rt"),
        account=found.get("-g", "-P", "-A"),
    )
