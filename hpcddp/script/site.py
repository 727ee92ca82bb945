"""A site: what one cluster's user guide says.

A fact that the guide does not give is absent here as well (None, or empty). docs/sites.md explains the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.record import Record

_NONE: Mapping[str, Any] = {}  # never written to
# As hpcddp/ranks/reach.py reads them; importing that costs a render the four modules behind it.
HOST_SUFFIX, INTERFACE = "HPCDDP_HOST_SUFFIX", "HPCDDP_INTERFACE"


class Limit(Record):
    """One rule: jobs of this many nodes and GPUs in all (first, last; None: any) run at most `walltime_s`, at least
    `least_s`, and use at most `node_hours`."""

    nodes: tuple[int, int] | None = None
    walltime_s: int | None = None
    node_hours: float | None = None
    gpus: tuple[int, int] | None = None
    least_s: int | None = None

    def takes(self, nodes: int, gpus: int) -> bool:
        """Whether this rule is about jobs of that size."""
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
    local_gb: int | None = None
    exclusive: bool = False
    routing: bool = False
    partition: str = ""
    qos: str = ""
    account: Mapping[str, Any] = _NONE
    gpu_chunks: bool = False
    limits: tuple[Limit, ...] = ()
    source: str = ""


class Account(Record):
    """Whether a job needs an account, the option that carries it ("": the scheduler's; none: it takes none), what a
    valid one looks like, and one. `command_line`: a script cannot carry it. `without`: what happens to a job that has
    none."""

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
    `agents`: what the site says of an agent, by its name."""

    name: str = ""
    options: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    bind: str = ""
    bind_full: str = ""
    agents: Mapping[str, str] = _NONE
    source: str = ""


class SiteRendezvous(Record):
    """`suffix` makes a host's short name its name on the network that ranks meet on; `interface` is a node's own name
    for its way there."""

    suffix: str = ""
    interface: str = ""
    source: str = ""

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """What tells the ranks of several nodes."""
        said = ((HOST_SUFFIX, self.suffix), (INTERFACE, self.interface))
        return tuple((name, value) for name, value in said if value)


class Staging(Record):
    """`folder`: the node's own disk, as a shell word such as $PBS_LOCALDIR."""

    folder: str = ""
    source: str = ""


class SiteContainer(Record):
    """What runs containers here, and the options that its launch needs on this site."""

    runtime: str = ""
    options: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    source: str = ""


class Site(Record):
    """One cluster's profile. `chunk`: what a chunk of select asks for; `size`, `queue_option` and `gpus_option`: how
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
    walltime_s: int | None = None
    queue: str = ""
    queues: Mapping[str, Queue] = _NONE
    account: Account = Account()
    variables: Mapping[str, Variable] = _NONE
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
        own = self.queues[queue].account if queue in self.queues else _NONE
        return self.account._replace(**own)

    def source(self, key: str) -> str:
        """Where a block's facts come from, for messages: address and date. A source may carry a date of its own."""
        text = self.sources.get(key, f"{self.name}.yaml")
        address, _, date = text.rpartition(" ")
        return f"{address}, {date}" if date[:2] == "20" and date[4:5] == "-" else f"{text}, {self.verified}"
