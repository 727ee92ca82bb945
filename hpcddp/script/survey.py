"""The start of a site's file: what the scheduler says of its queues and nodes, and comments for what only people know.

Text in, text out: of `sinfo --noheader --format=SINFO_FORMAT`, or of `qstat -Q -f -F json` and `pbsnodes -a -F json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

SINFO_FORMAT = "%R|%D|%c|%m|%G|%l"


class Found(NamedTuple):
    """One queue as the scheduler shows it; None: it does not say. `nodes`: how many it has."""

    name: str
    nodes: int | None = None
    cpus: int | None = None
    mem_gb: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    walltime: str | None = None


def parse_sinfo(text: str) -> list[Found]:
    """Partitions, of the largest node each has: `gpu|4|16|16000|gpu:a100:8(S:0-1)|1-00:00:00`."""
    found: dict[str, Found] = {}
    for line in text.splitlines():
        name, nodes, cpus, memory, gres, limit = line.split("|")
        gpu = re.search(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)", gres)
        one = Found(
            name,
            int(nodes),
            int(cpus.rstrip("+")),
            int(memory.rstrip("+")) // 1024 or None,
            int(gpu[2]) if gpu else 0,
            gpu[1] if gpu else None,
            _walltime(limit),
        )
        before = found.get(name)
        if before is None:
            found[name] = one
        else:
            larger = max(before, one, key=lambda f: (f.gpus or 0, f.cpus or 0))
            found[name] = larger._replace(nodes=(before.nodes or 0) + (one.nodes or 0))
    return list(found.values())


def parse_pbs(queues: str, nodes: str) -> list[Found]:
    """Queues that are open, with what their chunks get, else with the largest node of the server."""
    each = [n.get("resources_available", {}) for n in json.loads(nodes).get("nodes", {}).values()]
    largest: Mapping[str, Any] = max(each, key=lambda r: (r.get("ngpus", 0), r.get("ncpus", 0)), default={})
    found = []
    for name, queue in json.loads(queues).get("Queue", {}).items():
        if str(queue.get("enabled")) != "True":
            continue
        chunk = queue.get("default_chunk", {})
        most = queue.get("resources_max", {})
        memory = re.fullmatch(r"(\d+)gb", str(chunk.get("mem") or largest.get("mem") or ""))
        found.append(
            Found(
                name,
                most.get("nodect") or len(each) or None,
                chunk.get("ncpus") or largest.get("ncpus"),
                int(memory[1]) if memory else None,
                chunk.get("ngpus", largest.get("ngpus")),
                walltime=most.get("walltime"),
            )
        )
    return found


def format_start(name: str, scheduler: str, date: str, queues: Iterable[Found], asked: str) -> str:
    """The file's text. What was not found is a comment to fill in."""
    lines = [
        "# https://docs.example.org/  <- the address of the user guide: change it",
        "schema: 1",
        f"summary: {name}",
        f"scheduler: {scheduler}",
        "standing: practice         # documented, once each fact below names a page of the guide",
        f"verified: {date}",
        "sources:",
        f"  scheduler: {asked or 'nothing was asked'}",
        "#  jobs: https://docs.example.org/jobs",
        "",
        "# account: {required: true, source: jobs}    # option: -P, where it is not the scheduler's usual one",
        "# walltime: 1:00:00                          # if a job says none",
        *_queue_lines(list(queues)),
        "# modules: {load: [cuda, openmpi], source: jobs}",
        f"launcher: {{name: {'srun' if scheduler == 'slurm' else 'openmpi'}}}",
        "# env: {NCCL_SOCKET_IFNAME: ib0}",
        "# All keys: docs/sites.md. Leave out what you do not know: hpcddp asks for it.",
    ]
    if scheduler == "pbs":
        lines += ["chunk: [ncpus, ngpus]      # what a chunk of select has to name", "placement: scatter"]
    return "\n".join(lines) + "\n"


def _queue_lines(queues: list[Found]) -> Iterator[str]:
    if not queues:
        yield "# queue: gpu"
        yield "# queues:"
        yield "#   gpu: {gpus: 4, gpu: A100, cpus: 64, mem_gb: 512, source: jobs,"
        yield "#         limits: [{nodes: 1-8, walltime: 24:00:00}]}"
        return
    yield f"queue: {max(queues, key=lambda q: q.gpus or 0).name}"
    yield "queues:"
    for queue in queues:
        known = {"gpus": queue.gpus, "gpu": queue.gpu, "cpus": queue.cpus, "mem_gb": queue.mem_gb}
        facts = [f"{key}: {value}" for key, value in known.items() if value is not None]
        nodes = f"nodes: 1-{queue.nodes}" if (queue.nodes or 0) > 1 else "nodes: 1"
        rule = f"{nodes}, walltime: {queue.walltime}" if queue.walltime else nodes
        yield f"  {queue.name}: {{{', '.join([*facts, f'limits: [{{{rule}}}]', 'source: scheduler'])}}}"


def _walltime(limit: str) -> str | None:
    """sinfo's `1-00:00:00`, `30:00` (minutes) or `infinite`, as H:M:S."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in found.groups())
    return f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}"
