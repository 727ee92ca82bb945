"""A site: what one cluster's user guide says.

A fact that the guide does not give is absent here as well (None, or empty). docs/sites.md explains the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.units import format_walltime

_NONE: Mapping[str, Any] = {}  # never written to
# As hpcddp/ranks/reach.py reads them; importing that costs a render the four modules behind it.
HOST_SUFFIX, INTERFACE = "HPCDDP_HOST_SUFFIX", "HPCDDP_INTERFACE"


class Limit(Record):
    """A rule: jobs of this many nodes and GPUs in all (first, last; None: any) run at most `walltime_s`, at least
    `least_s`, and use at most `node_hours`."""

    nodes: tuple[int, int] | None = None
    walltime_s: int | None = None
    node_hours: float | None = None
    gpus: tuple[int, int] | None = None
    least_s: int | None = None

    def takes(self, nodes: int, gpus: int) -> bool:
        """The rule is about jobs of this size."""
        return all(span is None or span[0] <= n <= span[1] for span, n in ((self.nodes, nodes), (self.gpus, gpus)))

    def longest_s(self, nodes: int) -> int | None:
        """The longest walltime that the rule allows on `nodes` nodes; None if it does not say."""
        share = None if self.node_hours is None else int(self.node_hours * 3600) // nodes
        return min((s for s in (self.walltime_s, share) if s is not None), default=None)


class Queue(Record):
    """A PBS queue, Slurm partition or QOS, or resource type, with the node behind it. CPUs are what the scheduler
    counts. `gpu_type`: the word for the GPUs that a request has to name. `cpus_per_gpu`: the CPUs that go with each
    GPU, where nodes are shared. `routing`: the server chooses another queue by the job's size. `partition` and `qos`:
    what is asked for where that is not the queue's own name. `account`: what the site's rules for accounts say
    otherwise here. `gpu_chunks`: whether each chunk of a request is one GPU, with its share of the one node that all of
    them are on."""

    gpus: int | None = None
    gpu: str | None = None
    vendor: str = "nvidia"
    gpu_type: str = ""
    gpu_mem_gb: int | None = None
    cpus: int | None = None
    cpus_per_gpu: int | None = None
    cpu_unit: str = "core"
    mem_gb: int | None = None
    exclusive: bool = False
    routing: bool = False
    partition: str = ""
    qos: str = ""
    account: Mapping[str, Any] = _NONE
    gpu_chunks: bool = False
    limits: tuple[Limit, ...] = ()
    source: str = ""


class Account(Record):
    """A site's accounts. `option`: the one that carries it; "": the scheduler's; none: it takes none. `example` matches
    `pattern`. `command_line`: a script cannot carry it. `without`: what happens to a job that has none."""

    required: bool = False
    option: str = ""
    pattern: str = ""
    example: str = ""
    command_line: bool = False
    without: str = ""
    source: str = ""


class Variable(Record):
    """A word that only this site asks for. `directive` and `chunk` are printed when it has a value, in place of {}."""

    required: bool = False
    default: str = ""
    directive: str = ""
    chunk: str = ""
    pattern: str = ""
    example: str = ""
    meaning: str = ""
    source: str = ""


class Modules(Record):
    """`init`, `before` and `after` are shell lines; `init` defines `module`. `load` is in the order of loading."""

    init: str = ""
    before: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    source: str = ""


class SiteLauncher(Record):
    """The site's launcher (none: the guide names none), its further options, and the variables set by modules that
    remote ranks need. `bind` is how it binds CPUs; `bind_full` instead, where each GPU of a whole node has its rank.
    `node_agents`: what the site says of a node agent, by its name."""

    name: str = ""
    options: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    bind: str = ""
    bind_full: str = ""
    node_agents: Mapping[str, str] = _NONE
    source: str = ""


class SiteRendezvous(Record):
    """`suffix` makes a host's short name its name on the network that ranks meet on; `interface` is a node's own name
    for its way there."""

    suffix: str = ""
    interface: str = ""
    source: str = ""

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Variables for the rendezvous of ranks on several nodes."""
        values = ((HOST_SUFFIX, self.suffix), (INTERFACE, self.interface))
        return tuple((name, value) for name, value in values if value)


class Staging(Record):
    """`folder`: the node's own disk, as a shell word such as $PBS_LOCALDIR."""

    folder: str = ""
    source: str = ""


class SiteContainer(Record):
    """The container runtime of a site, and the options that it needs there."""

    runtime: str = ""
    options: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    source: str = ""


class Site(Record):
    """A cluster's profile. `chunk`: what a chunk of select asks for; `size`, `queue_option` and `gpus_option`: how
    size, queue and GPUs are written ("": the scheduler's own way); `rejects`: options that this site refuses;
    `asks_memory`: whether a job on a part of a node names its part of the memory, since it would get less;
    `overlay`: the file with the user's corrections, "" if there is none."""

    name: str
    file: str
    guide: str
    summary: str
    scheduler: str
    standing: str
    verified: str
    sources: Mapping[str, str] = _NONE
    cited: Mapping[str, str] = _NONE
    hostname: str = ""
    account: Account = Account()
    walltime_s: int | None = None
    queue: str = ""
    queues: Mapping[str, Queue] = _NONE
    vars: Mapping[str, Variable] = _NONE
    size: str = ""
    queue_option: str = ""
    gpus_option: str = ""
    chunk: tuple[str, ...] = ()
    placement: str = ""
    asks_memory: bool = False
    constraint: str = ""
    reservation: tuple[str, ...] = ()
    rejects: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    modules: Modules = Modules()
    launcher: SiteLauncher = SiteLauncher()
    gpu_order: tuple[str, ...] = ()
    rendezvous: SiteRendezvous = SiteRendezvous()
    staging: Staging = Staging()
    container: SiteContainer = SiteContainer()
    env: Mapping[str, str] = _NONE
    prepend: Mapping[str, str] = _NONE
    notes: tuple[str, ...] = ()
    overlay: str = ""

    def account_of(self, queue: str) -> Account:
        """The rules for accounts in this queue."""
        of_queue = self.queues[queue].account if queue in self.queues else _NONE
        return self.account._replace(**of_queue)

    def source(self, key: str) -> str:
        """The source of a block, for messages: address and date. A source may carry a date of its own."""
        text = self.sources.get(key, f"{self.name}.yaml")
        address, _, date = text.rpartition(" ")
        return f"{address}, {date}" if date[:2] == "20" and date[4:5] == "-" else f"{text}, {self.verified}"


# ---- a queue's limits


def check_limits(site: Site, queue: str, nodes: int, walltime_s: int, gpus: int = 0) -> None:
    """Raises RequestError unless the queue takes `nodes` with `gpus` in all for `walltime_s`. No rules: it takes all.

    Of several rules about a size, one has to allow the walltime: a server that routes chooses among its queues.
    """
    rules = site.queues[queue].limits
    if not rules:
        return
    source = site.source(site.queues[queue].source)
    about = [r for r in rules if r.takes(nodes, gpus)]
    lost = "; the server would drop the job without a word" if site.queues[queue].routing else ""
    if not about:
        size = f"{nodes} with {_span((gpus, gpus), 'GPU')}" if any(r.gpus for r in rules) else f"{nodes}"
        raise RequestError(
            f"queue {queue} of site {site.name} takes {', '.join(_size(r) for r in rules)} per job,"
            f" not {size} ({source}){lost}",
            f"nearest: {_nearest_size(rules, nodes, gpus // nodes)}"
            + _other_queue(site, queue, nodes, gpus, walltime_s),
        )
    if any(_allows(r, nodes, walltime_s) for r in about):
        return
    rule = max(about, key=lambda r: r.longest_s(nodes) or 0)
    longest, least = rule.longest_s(nodes), rule.least_s
    if longest is not None and walltime_s > longest:
        why, bound = f"{_jobs(rule, longest, nodes)} run at most", longest
    else:
        why, bound = f"{_jobs(rule, None, nodes)} run at least", least or 0
    raise RequestError(
        f"in queue {queue} of site {site.name} {why} {format_walltime(bound)},"
        f" not {format_walltime(walltime_s)} ({source}){lost}",
        f"nearest: --walltime {format_walltime(bound)}",
    )


def _allows(rule: Limit, nodes: int, walltime_s: int) -> bool:
    longest = rule.longest_s(nodes)
    return (longest is None or walltime_s <= longest) and walltime_s >= (rule.least_s or 0)


def _jobs(rule: Limit, longest_s: int | None, nodes: int) -> str:
    if longest_s is not None and longest_s != rule.walltime_s:
        return f"a job uses at most {rule.node_hours:g} node-hours: {_span((nodes, nodes), 'node')}"
    return f"jobs of {_size(rule)}"


def _nearest_size(rules: tuple[Limit, ...], nodes: int, gpus_per_node: int) -> str:
    ends = {end for r in rules for end in r.nodes or ()}
    ends |= {end // gpus_per_node for r in rules for end in (r.gpus or () if gpus_per_node else ())}
    fits = [end for end in ends if end and any(r.takes(end, end * gpus_per_node) for r in rules)]
    if not fits:
        each = {end // nodes for r in rules for end in r.gpus or ()}
        fits = [gpus for gpus in each if any(r.takes(nodes, nodes * gpus) for r in rules)]
        nearest = min(sorted(fits), key=lambda gpus: abs(gpus - gpus_per_node), default=None)
        return "other --nodes, or other --gpus-per-node" if nearest is None else f"--gpus-per-node {nearest}"
    return f"--nodes {min(sorted(fits), key=lambda end: abs(end - nodes))}"


def _other_queue(site: Site, queue: str, nodes: int, gpus: int, walltime_s: int) -> str:
    """A queue of the same GPUs that takes the job, else one that takes its size."""
    others = [(name, q) for name, q in site.queues.items() if name != queue and q.gpu == site.queues[queue].gpu]
    fits = [(name, [r for r in q.limits if r.takes(nodes, gpus)]) for name, q in others]
    by_time = [name for name, rules in fits if any(_allows(r, nodes, walltime_s) for r in rules)]
    named = by_time or [name for name, rules in fits if rules]
    return f", or --queue {named[0]}" if named else ""


def _size(rule: Limit) -> str:
    spans = [_span(span, word) for span, word in ((rule.nodes, "node"), (rule.gpus, "GPU")) if span]
    return " and ".join(spans) or "any size"


def _span(span: tuple[int, int], word: str) -> str:
    first, last = span
    if first == last:
        return f"{first} {word}" if first == 1 else f"{first} {word}s"
    return f"{first} to {last} {word}s"
