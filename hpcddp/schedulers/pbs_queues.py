"""What PBS prints of its queues and nodes. Recorded answers: tests/captures/pbs."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.row import QueueFound
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_SIZES = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}  # PBS Reference Guide, size
_NOTHING: Mapping[str, Any] = {}


class _Node(Record):
    """What one host has, or one chunk gets; None: it is not said."""

    cpus: int | None = None
    mem: int | None = None  # in bytes
    gpus: int | None = None


def parse_queues(queues: str, nodes: str) -> list[QueueFound]:
    """Queues with what a chunk gets by default, else with the host, if all hosts of the server are alike: nothing says
    which hosts a queue has. ValueError for a text that shows no queue.

    `queues`: what `qstat -Q -f -F json` prints; `nodes`: what `pbsnodes -a -F json` prints.
    """
    import json

    named = _mapping(json.loads(queues), "Queue")
    if not named:
        raise ValueError("it shows no queue")
    hosts = _hosts(_mapping(json.loads(nodes), "nodes"))
    host = _alike(hosts)
    found = []
    for name, queue in named.items():
        most = _mapping(queue, "resources_max")
        most_nodes = _number(most.get("nodect")) or None
        chunk = _node(_mapping(queue, "default_chunk"))
        node = chunk
        if chunk == _Node() or (chunk.cpus is not None and chunk.cpus == host.cpus):  # a chunk is a whole host
            node = _Node(host.cpus, chunk.mem or host.mem, host.gpus if chunk.gpus is None else chunk.gpus)
        said = {"cpus": chunk.cpus, "mem_gb": chunk.mem, "gpus": chunk.gpus}
        found.append(
            QueueFound(
                name,
                most_nodes or len(hosts) or None,
                node.cpus or None,
                (node.mem or 0) // _SIZES["gb"] or None,
                node.gpus,
                walltime=_walltime(most.get("walltime")),
                most_nodes=most_nodes,
                is_open=str(_get(queue, "enabled")) == str(_get(queue, "started")) == "True",
                defaults=tuple(key for key, value in said.items() if value is not None),
            )
        )
    return found


def _hosts(nodes: Mapping[str, Any]) -> list[_Node]:
    """Hosts with CPUs. One may be several vnodes, each with a part of it, beside one of its own name that has nothing:
    seen with OpenPBS 23.06."""
    parts: dict[str, list[_Node]] = {}
    for name, node in nodes.items():
        has = _mapping(node, "resources_available")
        parts.setdefault(str(has.get("host", name)), []).append(_node(has))
    counted = any(node.gpus is not None for vnodes in parts.values() for node in vnodes)
    hosts = [
        _Node(
            sum(node.cpus or 0 for node in vnodes),
            sum(node.mem or 0 for node in vnodes),
            sum(node.gpus or 0 for node in vnodes) if counted else None,
        )
        for vnodes in parts.values()
    ]
    return [host for host in hosts if host.cpus]


def _alike(hosts: list[_Node]) -> _Node:
    """The host that all are, with the least memory of any; nothing if they differ."""
    if len({(host.cpus, host.gpus) for host in hosts}) != 1:
        return _Node()
    return hosts[0]._replace(mem=min(host.mem or 0 for host in hosts) or None)


def _node(resources: Mapping[str, Any]) -> _Node:
    return _Node(*(read(resources.get(key)) for key, read in (("ncpus", _number), ("mem", _bytes), ("ngpus", _number))))


def _mapping(value: object, key: str) -> Mapping[str, Any]:
    """The mapping under a key; an empty one for anything else."""
    found = _get(value, key)
    return found if isinstance(found, dict) else _NOTHING


def _get(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None


def _number(value: object) -> int | None:
    return None if isinstance(value, bool) else read_number(str(value))


def _bytes(value: object) -> int | None:
    import re

    said = re.fullmatch(r"(\d{1,18})([kmgt]?b)", str(value).lower(), re.ASCII)
    return int(said[1]) * _SIZES[said[2]] if said else None


def _walltime(value: object) -> str | None:
    """`168:00:00`; None for another form, and for no time at all."""
    import re

    text = str(value)
    return text if re.fullmatch(r"\d{1,9}:[0-5]\d:[0-5]\d", text, re.ASCII) and text.strip("0:") else None
