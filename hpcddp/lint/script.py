"""A job script as the rules read it: text, directives, commands, request, site; and the mistakes that they report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hpcddp.errors import RequestError
from hpcddp.lint.directives import ScriptDirectives, is_torque, read_pbs, read_slurm
from hpcddp.lint.launches import NAMED_HOSTS, LaunchCommand, count_processes, find_launches
from hpcddp.lint.request import Request, parse_request
from hpcddp.lint.shell import REACHES, Command, read_commands
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site import Queue, Site

READERS: dict[str, Callable[[str], ScriptDirectives]] = {"pbs": read_pbs, "slurm": read_slurm}
PREFIXES = {name: find_scheduler(name).directives.prefix for name in READERS}


@dataclass(frozen=True, slots=True)
class Script:
    """`values` are variables that only ever get one plain value; `folder_exists` tells it for a path here."""

    text: str
    scheduler: str
    directives: ScriptDirectives
    request: Request
    commands: tuple[Command, ...]
    values: dict[str, str]
    launches: tuple[LaunchCommand, ...]
    site: Site | None
    folder_exists: Callable[[str], bool]

    @property
    def code(self) -> str:
        """The commands as they stand, one after the other: no comments, no here-documents."""
        return "\n".join(c.text for c in self.commands)

    @property
    def queue_name(self) -> str:
        """The site's queue that the script is for; "" where the server chooses it."""
        if self.site is None or self.site.queue_option == "none":
            return ""
        return self._named_queue(self.site) or self.site.queue

    def _named_queue(self, site: Site) -> str:
        """The name in the site's file of the queue that the script requests; "" where it requests none."""
        option = self.directives.get(site.queue_option) if site.queue_option else self.request.queue
        qos = self.directives.get("--qos")
        if option and not qos and option.value in site.queues:
            return option.value
        partition = option.value if option else site.queues.get(site.queue, Queue()).partition or site.queue
        for name, queue in site.queues.items():
            both = (queue.partition or name, queue.qos) == (partition, qos.value if qos else "")
            if both and (queue.partition or queue.qos):
                return name
        return option.value if option else ""

    def request_on(self, site: Site) -> Request:
        """The request as this site takes it: in some queues each chunk is a GPU, and all of them are on one node; some
        sites are asked for the totals of a job."""
        request, queue = self.request, site.queues.get(self._named_queue(site) or site.queue, Queue())
        if site.size == "totals" and not request.nodes and request.cpus_per_node and queue.cpus:
            nodes = -(-request.cpus_per_node // queue.cpus)
            cpus, gpus = (part and part // nodes for part in (request.cpus_per_node, request.gpus_per_node))
            return request._replace(nodes=nodes, cpus_per_node=cpus, gpus_per_node=gpus)
        if not queue.gpu_chunks or not request.nodes or request.gpus_per_node is not None:
            return request
        slots = request.slots and request.slots * request.nodes
        return request._replace(nodes=1, gpus_per_node=request.nodes, slots=slots)

    @property
    def queue(self) -> Queue:
        """The node behind the script's queue, as far as the site says."""
        return self.site.queues.get(self.queue_name, Queue()) if self.site else Queue()

    def assigned(self, name: str) -> list[tuple[Command, str]]:
        """Every assignment to a variable."""
        return [(c, value) for c in self.commands for n, value in c.sets if n == name]

    def reaches(self) -> bool:
        """Some command starts processes on other nodes, or may: its name is in a variable."""
        names = {word.rsplit("/", 1)[-1] for command in self.commands for word in command.words}
        return bool(REACHES & names) or any(c.words[0].startswith("$") for c in self.commands if c.words)

    def launch_of(self, command: Command) -> LaunchCommand | None:
        """The launcher that starts a command's processes: it stands before it, or starts the text or the script that it
        is in."""
        for launch in self.launches:
            words = {word.rsplit("/", 1)[-1] for word in launch.command.words}
            inside = command.document in words if command.document else command.text in launch.command.text
            if launch.command == command or (command.launched and (inside or command.document == launch.command.text)):
                return launch
        return None

    def on_several_nodes(self, launch: LaunchCommand) -> bool:
        """The launcher surely starts something on more than one node."""
        wanted = count_processes(launch)
        one = wanted == 1 or (launch.launcher == "srun" and launch.option("-N", "--nodes") == "1")
        packed = launch.launcher != "srun" and wanted and not launch.is_placed and wanted <= (self.request.slots or 1)
        return self.several_nodes() and bool(launch.started) and not (one or packed or launch.has(*NAMED_HOSTS))

    def several_nodes(self) -> bool:
        """The script requests more than one node."""
        return (self.request.nodes or 1) > 1


def read_script(text: str, site: Site | None, folder_exists: Callable[[str], bool]) -> Script:
    """The script for the site's scheduler; without a site, for the one whose directives it has."""
    scheduler = site.scheduler if site and site.scheduler in READERS else guess_scheduler(text)
    if scheduler == "pbs":
        directives = read_pbs(text, torque=site.size == "nodes" if site else is_torque(text))
    else:
        directives = READERS[scheduler](text)
    commands = tuple(read_commands(unix_lines(text)))
    values = _plain_values(commands)
    launches = tuple(find_launches(commands, values))
    request = parse_request(directives)
    script = Script(text, scheduler, directives, request, commands, values, launches, site, folder_exists)
    return replace(script, request=script.request_on(site)) if site else script


def unix_lines(text: str) -> str:
    """The script that was meant, where an editor wrote CR LF."""
    return text.replace("\r\n", "\n")


def guess_scheduler(text: str) -> str:
    """The scheduler with the most directives; PBS where there is none."""
    counts = _count_directives(text)
    return max(counts, key=lambda name: counts[name])


def refuse_other_directives(file: str, text: str) -> None:
    """RequestError where the only directives are of a scheduler without rules here: "nothing was found" would look like
    a good result."""
    other = re.search(r"^#([A-Z][A-Z0-9_]*|[a-z]+:|\$)(?=[ \t]+--?[A-Za-z])", text, re.M)
    if other is None or any(_count_directives(text).values()):
        return
    line = text.count("\n", 0, other.start()) + 1
    raise RequestError(
        f"{file}:{line}: lint has no rules for {other[0]} lines, only for {' '.join(PREFIXES.values())}",
        f"give it a script for {' or '.join(find_scheduler(name).title for name in READERS)}, or a .py file",
    )


def _count_directives(text: str) -> dict[str, int]:
    return {name: len(re.findall(rf"^\s*{re.escape(p)}(?=[\s-])", text, re.M)) for name, p in PREFIXES.items()}


def _plain_values(commands: tuple[Command, ...]) -> dict[str, str]:
    values: dict[str, set[str]] = {}
    for command in commands:
        for name, value in command.sets:
            values.setdefault(name, set()).add(value)
    plain = {n: {v for v in vs if re.fullmatch(r"[\w./-]+( +[\w./=-]+)*", v)} for n, vs in values.items()}
    # launcher=$(type -P mpirun) || launcher=mpirun is mpirun, too; a number that is also computed is unknown
    return {
        n: next(iter(p))
        for n, p in plain.items()
        if len(p) == 1 and (len(values[n]) == 1 or not next(iter(p)).isdecimal())
    }


class Problem(NamedTuple):
    """What a rule found: its line, what is wrong, and what to write instead."""

    line: int
    what: str
    instead: str


class Rule(NamedTuple):
    """One mistake. `certain`: an error on every site. Otherwise it depends on the site, and lint reports a warning."""

    id: str
    certain: bool
    check: Callable[[Any], Iterator[Problem]]  # of a Script or a TrainingScript


class Finding(NamedTuple):
    """A mistake as it is reported. `kind`: mistake or warning."""

    file: str
    line: int
    rule: str
    kind: str
    what: str
    instead: str
