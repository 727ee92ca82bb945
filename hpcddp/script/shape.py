"""The numbers of a job: nodes, ranks, GPUs, CPUs, memory and threads, from the request, else from the queue's node."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.script.missing import known
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec
from hpcddp.units import format_count


class Shape(Record):
    """What a job occupies. CPUs are what the scheduler counts (cores or hardware threads), threads are cores.
    `gpus_per_rank` is 1 where ranks share one, too; `mem_gb` is of each node, 0 where nothing is said about it.
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    gpus_per_rank: int
    cpus_per_node: int
    cpus_per_rank: int
    threads_per_rank: int
    mem_gb: int


def plan_shape(spec: JobSpec, site: Site, queue: Queue, local_cpus: int | None = None) -> Shape:
    """The shape of `spec` on a node of `queue`. With `local_cpus` this machine is the node, and may be overbooked.

    Raises RequestError when a node cannot hold the request. `check_complete` has seen that every number is given.
    """
    gpus = known(queue.gpus if spec.gpus_per_node is None else spec.gpus_per_node)
    each = spec.gpus_per_rank or 1
    if each > 1:
        _check_shares(spec, gpus, each)
    ranks = spec.ranks_per_node or max(gpus // each, 1)
    if spec.exclusive and queue.cpus:  # the whole node is charged, so that the job has all of it
        queue = queue._replace(exclusive=True, cpus_per_gpu=None)
    with_gpus = queue.cpus_per_gpu * gpus if queue.cpus_per_gpu and gpus else _even_share(site, queue, gpus)
    available = spec.cpus_per_node or with_gpus or queue.cpus or local_cpus
    cpus = known(available) // ranks if spec.cpus_per_rank is None else spec.cpus_per_rank
    if local_cpus is None:
        share = f"that go with {format_count(gpus, 'GPU')}" if available == with_gpus else "of a node"
        _check_fit(site, queue, gpus, ranks, cpus, available, share)
    cpus = max(cpus, 1)
    threads = cpus // 2 if queue.cpu_unit == "hwthread" else cpus
    on_node = spec.cpus_per_node or with_gpus or cpus * ranks
    memory = _plan_memory(spec, site, queue, gpus)
    return Shape(spec.nodes or 1, ranks, gpus, each, on_node, cpus, max(threads, 1), memory)


def check_whole_nodes(site: Site, queue: Queue, nodes: int, cpus: int, *, asked: bool = False) -> None:
    """RequestError for parts of several nodes where a request is the totals of a job: the server would pack `cpus` of
    each into fewer nodes. `asked`: whether the request names them."""
    if site.size != "totals" or nodes == 1 or not queue.cpus or cpus == queue.cpus:
        return
    source = site.source(site.cited.get("size", ""))
    all_of_it = f"--gpus-per-node {queue.gpus}" if queue.gpus else f"--set cpus_per_node={queue.cpus}"
    all_of_it = "leave out cpus_per_node" if asked else all_of_it
    raise RequestError(
        f"site {site.name} is asked for the totals of a job: {nodes} nodes are whole nodes, of {queue.cpus} CPUs each,"
        f" not {format_count(cpus, 'CPU')} ({source})",
        f"{all_of_it}, or --nodes 1",
    )


def _even_share(site: Site, queue: Queue, gpus: int) -> int | None:
    """The CPUs that go with a part of a shared node's GPUs, where the guide gives no number for each: the same part of
    the CPUs. None where the node, or a fixed resource type, is the job's alone."""
    if queue.exclusive or site.size == "type" or not queue.cpus or not queue.gpus or not 0 < gpus < queue.gpus:
        return None
    return max(queue.cpus * gpus // queue.gpus, 1)


def _check_shares(spec: JobSpec, gpus: int, each: int) -> None:
    """RequestError unless ranks with so many GPUs each take all of a node's."""
    node = f"a node has {format_count(gpus, 'GPU')}"
    if gpus < each:
        by_user = "gpus" in spec.sources.get("gpus_per_node", "")  # and not by the machine that is there
        more = f"--gpus-per-node {each}, or " if by_user else ""
        raise RequestError(f"gpus_per_rank {each}: {node} here", f"{more}leave out gpus_per_rank")
    if spec.ranks_per_node is not None and spec.ranks_per_node * each != gpus:
        raise RequestError(
            f"gpus_per_rank {each} for {format_count(spec.ranks_per_node, 'rank')} per node is"
            f" {format_count(spec.ranks_per_node * each, 'GPU')}, and {node} here",
            f"--gpus-per-node {spec.ranks_per_node * each}"
            if spec.ranks_per_node * each < gpus
            else f"--ranks-per-node {gpus // each}",
        )
    if gpus % each:
        fits = [number for number in range(2, gpus + 1) if gpus % number == 0]
        raise RequestError(
            f"gpus_per_rank {each}: {node} here, which do not divide into groups of {each}",
            f"--set gpus_per_rank={' or '.join(map(str, fits))}, or --gpus-per-node {gpus - gpus % each}",
        )


def _plan_memory(spec: JobSpec, site: Site, queue: Queue, gpus: int) -> int:
    """What is asked for; else the node's, where the site's request has to name memory: by its share of the GPUs if the
    node is shared."""
    if spec.mem_gb:
        if queue.mem_gb and spec.mem_gb > queue.mem_gb:
            raise RequestError(
                f"{spec.mem_gb} GB do not fit on a node of {queue.mem_gb} GB ({site.source(queue.source)})",
                f"nearest: --set mem_gb={queue.mem_gb}",
            )
        return spec.mem_gb
    asks = "mem" in site.chunk or (site.asks_memory and not queue.exclusive and queue.mem_gb)
    if not asks:
        return 0
    mem_gb = known(queue.mem_gb)
    return mem_gb * gpus // queue.gpus if queue.gpus and gpus and not queue.exclusive else mem_gb


def _check_fit(site: Site, queue: Queue, gpus: int, ranks: int, cpus: int, available: int | None, share: str) -> None:
    """RequestError for more than a node has: the job would wait forever, or run on fewer CPUs than asked for. `share`:
    whose the CPUs are that are available."""
    source = site.source(queue.source)
    if queue.gpus is not None and gpus > queue.gpus:
        raise RequestError(
            f"{format_count(gpus, 'GPU')} per node do not fit: a node has {queue.gpus} ({source})",
            f"nearest: --gpus-per-node {queue.gpus}",
        )
    most = min(filter(None, (queue.cpus, available)), default=None)
    whose = share if most != queue.cpus else "of a node"
    if most is not None and ranks > most:
        raise RequestError(
            f"{ranks} ranks do not fit on the {format_count(most, 'CPU')} {whose} ({source})",
            f"nearest: --ranks-per-node {most}",
        )
    too_many = queue.cpus is not None and available is not None and available > queue.cpus
    if most is not None and (cpus * ranks > most or too_many):
        raise RequestError(
            f"{format_count(ranks, 'rank')} of {format_count(cpus, 'CPU')} do not fit on the"
            f" {format_count(most, 'CPU')} {whose} ({source})",
            f"nearest: --cpus-per-rank {most // ranks}",
        )
