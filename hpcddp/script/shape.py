"""The numbers of a job: nodes, ranks, GPUs, CPUs, memory and threads, from the request, else from the queue's node."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.errors import RequestError, SiteError
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job occupies. CPUs are what the scheduler counts (cores or hardware threads), threads are cores.
    `mem_gb` is of each node, 0 where nothing is said about it."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    cpus_per_rank: int
    threads_per_rank: int
    mem_gb: int


def plan_shape(spec: JobSpec, site: Site, queue: Queue, local_cpus: int | None = None) -> Shape:
    """The shape of `spec` on a node of `queue`. With `local_cpus` this machine is the node, and may be overbooked.

    Raises SiteError when neither request nor site gives a number, RequestError when a node cannot hold the request.
    """
    gpus = queue.gpus if spec.gpus_per_node is None else spec.gpus_per_node
    if gpus is None:
        raise SiteError(f"site {site.name} does not say how many GPUs a node has", "--gpus-per-node 4 (0 for none)")
    ranks = spec.ranks_per_node or max(gpus, 1)
    with_gpus = queue.cpus_per_gpu * gpus if queue.cpus_per_gpu and gpus else None
    available = spec.cpus_per_node or with_gpus or queue.cpus or local_cpus
    cpus = spec.cpus_per_rank
    if cpus is None and available is None:
        raise SiteError(
            f"site {site.name} does not say how many CPUs a node has",
            f"--cpus-per-rank 8, for each of a node's {ranks} ranks",
        )
    if cpus is None and available is not None:
        cpus = available // ranks
    if local_cpus is None:
        _check_fit(site, queue, gpus, ranks, cpus or 0, available)
    cpus = max(cpus or 0, 1)
    threads = cpus // 2 if queue.cpu_unit == "hwthread" else cpus
    on_node = spec.cpus_per_node or with_gpus or cpus * ranks
    memory = _plan_memory(spec, site, queue, gpus)
    return Shape(spec.nodes or 1, ranks, gpus, on_node, cpus, max(threads, 1), memory)


def _plan_memory(spec: JobSpec, site: Site, queue: Queue, gpus: int) -> int:
    """What is asked for; where the site's request has to name memory, else the node's, by its share of the GPUs."""
    if spec.mem_gb:
        if queue.mem_gb and spec.mem_gb > queue.mem_gb:
            raise RequestError(
                f"{spec.mem_gb} GB do not fit on a node of {queue.mem_gb} GB ({site.source(queue.source)})",
                f"nearest: --set mem_gb={queue.mem_gb}",
            )
        return spec.mem_gb
    if "mem" not in site.chunk:
        return 0
    if queue.mem_gb is None:
        raise SiteError(f"site {site.name} does not say how much memory a node has", "--set mem_gb=90, for each node")
    return queue.mem_gb * gpus // queue.gpus if queue.gpus and gpus else queue.mem_gb


def _check_fit(site: Site, queue: Queue, gpus: int, ranks: int, cpus: int, available: int | None) -> None:
    """A scheduler keeps a request that no node can hold waiting for ever, or runs it on fewer CPUs than asked for."""
    source = site.source(queue.source)
    if queue.gpus is not None and gpus > queue.gpus:
        raise RequestError(
            f"{gpus} GPUs per node do not fit: a node has {queue.gpus} ({source})",
            f"nearest: --gpus-per-node {queue.gpus}",
        )
    most = min(filter(None, (queue.cpus, available)), default=None)
    if most is not None and ranks > most:
        raise RequestError(
            f"{ranks} ranks do not fit on the {most} CPUs of a node ({source})", f"nearest: --ranks-per-node {most}"
        )
    too_many = queue.cpus is not None and available is not None and available > queue.cpus
    if most is not None and (cpus * ranks > most or too_many):
        raise RequestError(
            f"{ranks} ranks of {cpus} CPUs do not fit on the {most} CPUs of a node ({source})",
            f"nearest: --cpus-per-rank {most // ranks}",
        )
