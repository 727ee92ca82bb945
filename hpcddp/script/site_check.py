"""A site's file against what its scheduler and its module system say now: text in, differences out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpcddp.ranks.launchers import launchers_under
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import CommandAnswer, QueueFound
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import quote_word
from hpcddp.units import format_count, format_walltime, parse_walltime

_NEAR = 0.9  # of the memory that is installed, the system and the scheduler keep a part; guides count it in GB or GiB


def compare_queues(site: Site, found: Sequence[QueueFound], command: str) -> list[str]:
    """The differences of queues, their limits and their nodes. `command`: the command that found them."""
    live = {queue.name: queue for queue in found}
    differences = []
    listed = [queue.partition or name for name, queue in site.queues.items() if not queue.qos]
    if listed and not live.keys() & set(listed):
        return [f"none of the queues of the site's file is in {command}: this may be another machine"]
    for name, queue in site.queues.items():
        if queue.qos:  # a QOS is in no list of partitions
            continue
        now = live.get(queue.partition or name)
        if now is None:
            differences.append(f"queue {name}: it is in the site's file, and not in {command}")
            continue
        if not now.is_open:
            differences.append(f"queue {name}: it takes no jobs now, by {command}")
        pairs = (*_compare_limits(queue, now), *_compare_nodes(name, site, now))
        differences += [
            f"queue {name}: {recorded} in the site's file, {there} by {command}" for recorded, there in pairs
        ]
    return differences


def _compare_limits(queue: Queue, now: QueueFound) -> Iterator[tuple[str, str]]:
    """Compare a queue's limits: what the file says, and what is so."""
    longest = max((rule.walltime_s for rule in queue.limits if rule.walltime_s is not None), default=None)
    live_s = None if now.walltime is None else parse_walltime(now.walltime, "walltime")
    if longest is not None and live_s is not None and longest != live_s:
        yield f"walltime {format_walltime(longest)}", format_walltime(live_s)
    most = max((rule.nodes[1] for rule in queue.limits if rule.nodes is not None), default=None)
    live = min((count for count in (now.most_nodes, now.nodes) if count), default=None)
    if most is not None and live is not None and (most > live or (now.most_nodes is not None and most < live)):
        yield f"at most {format_count(most, 'node')}", str(live)


def _compare_nodes(name: str, site: Site, now: QueueFound) -> Iterator[tuple[str, str]]:
    """Compare a queue's nodes: what the file says and no node has. A file may say less than there is."""
    for key, word, recorded, live in _node_numbers(name, site, now):
        if recorded is None or live is None:
            continue
        near = _NEAR if key == "mem_gb" and "mem" not in site.chunk and not site.asks_memory else 1
        if recorded * near > live or (key == "gpus" and recorded != live and not now.mixed):
            yield f"{recorded} {word} in each node", str(live)


def _node_numbers(name: str, site: Site, now: QueueFound) -> list[tuple[str, str, int | None, int | None]]:
    """Key, word, what the file says, and what the scheduler does. What a request gets that names nothing says nothing
    of one that names it, or that has whole nodes."""
    queue = site.queues[name]
    numbers = (
        ("gpus", "GPUs", "ngpus", queue.gpus, now.gpus),
        ("cpus", "CPUs", "ncpus", queue.cpus, now.cpus),
        ("mem_gb", "GB of memory", "mem", queue.mem_gb, now.mem_gb),
    )
    return [
        (key, word, recorded, None if key in now.defaults and (queue.exclusive or resource in site.chunk) else live)
        for key, word, resource, recorded, live in numbers
    ]


# ---- the site's modules against this machine's

_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)


class ModulesCompared(Record):
    """Differences of modules, what could not be asked, and whether a login shell has the command `module`."""

    differences: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    has_command: bool = True


def compare_modules(site: Site, ask: Callable[[str], CommandAnswer]) -> ModulesCompared:
    """The modules of the file beside those of a login shell, to which `ask` gives lines.

    A module may show only what others need once it is loaded: behind one that is not there nothing is known.
    """
    answer = ask(_ask_modules(site))
    if "HPCDDP-NO-MODULES" in answer.stdout:
        return ModulesCompared(unasked=("a login shell here has no `module` command",), has_command=False)
    if "HPCDDP-ASKED" not in answer.stdout:
        problem = f"the module system does not answer in a login shell (status {answer.status})"
        return ModulesCompared(unasked=(problem,))
    missing = dict(_list_missing(answer.stdout))
    if not missing:
        return ModulesCompared()
    (first, others), *behind = missing.items()
    known = f"; there is {', '.join(others[:6])}" if others else ""
    unasked = tuple(f"module {name}: not found without {first}" for name, _ in behind)
    return ModulesCompared((f"module {first} is not there{known}",), unasked)


def _ask_modules(site: Site) -> str:
    """Shell lines for a login shell, which ask for each module and load it; the file's own first lines go before."""
    begin = [site.modules.init] if site.modules.init else []
    lines = [*begin, "type module >/dev/null 2>&1 || { echo HPCDDP-NO-MODULES; exit; }", *site.modules.before]
    for name in site.modules.load:
        word, base = quote_word(name), quote_word(name.split("/")[0])
        lines.append(
            f"echo; echo HPCDDP-MODULE {word}; if module is-avail {word} >/dev/null 2>&1; then echo HPCDDP-THERE; "
            f"else module -t avail {base} 2>&1; fi; module load {word} </dev/null >/dev/null 2>&1"
        )
    return "\n".join([*lines, "echo; echo HPCDDP-ASKED"]) + "\n"


def _list_missing(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """List from the output of those lines each module that is missing, and those of the same name that exist. If
    `is-avail` is not known, a line of the list has to be the module, or a version of it."""
    for part in text.split("HPCDDP-MODULE ")[1:]:
        name, *lines = [line.strip() for line in part.splitlines()]
        others = [re.sub(r"\((default|D|L)[^)]*\)$", "", line).rstrip("/").strip() for line in lines]
        if "HPCDDP-THERE" not in others and not any(one == name or one.startswith(f"{name}/") for one in others):
            base = name.split("/")[0]
            same = [one for one in others if _NAME.fullmatch(one) and one.startswith(f"{base}/")]
            yield name, tuple(dict.fromkeys(same))


# ---- a new site file


def format_new_site(name: str, scheduler: str, date: str, queues: Iterable[QueueFound], command: str) -> str:
    """The file's text. What was not found is a comment to fill in."""
    row = find_scheduler(scheduler)
    lines = [
        "# https://docs.example.org/  <- the address of the user guide: change it",
        "schema: 1",
        f"summary: {name}",
        f"scheduler: {scheduler}",
        "standing: practice         # documented, once each fact below names a page of the guide",
        f"verified: {date}",
        "sources:",
        f"  scheduler: {command or 'nothing was asked'}",
        "#  jobs: https://docs.example.org/jobs",
        "",
        "# account: {required: true, source: jobs}",
        "# walltime: 1:00:00                          # if a job says none",
        *_queue_lines(list(queues)),
        "# modules: {load: [cuda, mpi], source: jobs}",
        f"launcher: {{name: {launchers_under(scheduler)[0]}}}",
        "# env: {NCCL_SOCKET_IFNAME: ib0}",
        "# All keys: docs/sites.md. Leave out what you do not know: hpcddp asks for it.",
        *row.commands.site_lines,
    ]
    return "\n".join(lines) + "\n"


def _queue_lines(queues: list[QueueFound]) -> Iterator[str]:
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
        numbers = [f"{key}: {value}" for key, value in known.items() if value is not None]
        nodes = f"nodes: 1-{queue.nodes}" if (queue.nodes or 0) > 1 else "nodes: 1"
        rule = f"{nodes}, walltime: {queue.walltime}" if queue.walltime else nodes
        yield f"  {queue.name}: {{{', '.join([*numbers, f'limits: [{{{rule}}}]', 'source: scheduler'])}}}"
