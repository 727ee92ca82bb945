"""What a script asks for, in one vocabulary for the three schedulers. None is what it does not say, or not plainly."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.lint.directive import Option, ScriptDirectives
from hpcddp.lint.pbs import chunks

# TSUBAME's and ABCI 2.0's resource types, whose value is a number of nodes or of parts of one.
_NODE_TYPES = re.compile(r"-l (node_[fhqo]|cpu_\d+|gpu_[1h]|rt_[A-Z]\w*(\.\w+)?)")


class Request(NamedTuple):
    """Counts per node are the first chunk's. `slots` are the processes per node that the scheduler tells a launcher."""

    nodes: int | None = None
    slots: int | None = None
    ranks: int | None = None
    cpus_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    size: Option | None = None
    queue: Option | None = None
    walltime: Option | None = None
    account: Option | None = None


def read_request(found: ScriptDirectives) -> Request:
    """The request in one scheduler's directives."""
    return {"pbs": _pbs, "slurm": _slurm, "gridengine": _gridengine}[found.scheduler](found)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and text.isascii() else None


def _pbs(found: ScriptDirectives) -> Request:
    select, torque = found.get("-l select"), found.get("-l nodes")
    common = Request(
        queue=found.get("-q"),
        walltime=found.get("-l walltime"),
        account=found.get("-P", "-A", "-W group_list"),
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
        count, _, rest = torque.value.partition(":")
        ppn = re.search(r"\bppn=(\d+)", rest)
        return common._replace(nodes=_number(count), slots=_number(ppn[1]) if ppn else None)
    return common


def _slurm(found: ScriptDirectives) -> Request:
    def value(*names: str) -> str | None:
        option = found.get(*names)
        return option.value if option else None

    nodes = _number((value("--nodes") or "").partition("-")[0])
    ranks, slots = _number(value("--ntasks")), _number(value("--ntasks-per-node"))
    if slots is None and ranks and nodes and ranks % nodes == 0:
        slots = ranks // nodes
    threads = _number(value("--cpus-per-task"))
    gpus = re.search(r"(?:^|:)(\d+)$", value("--gpus-per-node") or "")
    gres = re.search(r"\bgpu(?::\w+)?:(\d+)", value("--gres") or "")
    return Request(
        nodes=nodes,
        slots=slots,
        ranks=ranks or (nodes * slots if nodes and slots else None),
        cpus_per_node=threads * slots if threads and slots else None,
        cpus_per_task=threads,
        gpus_per_node=_number((gpus or gres or [None, None])[1]),
        size=found.get("--nodes"),
        queue=found.get("--partition"),
        walltime=found.get("--time"),
        account=found.get("--account"),
    )


def _gridengine(found: ScriptDirectives) -> Request:
    size = next((o for o in found.options if _NODE_TYPES.fullmatch(o.name)), None)
    whole = size is not None and size.name in {"-l node_f", "-l rt_F"}
    return Request(
        nodes=_number(size.value) if whole and size else None,
        size=size,
        queue=found.get("-q"),
        walltime=found.get("-l h_rt"),
        account=found.get("-g", "-P", "-A"),
    )
