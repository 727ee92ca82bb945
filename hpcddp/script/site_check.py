"""A site's file against what its scheduler and its module system say now: text in, differences out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.record import Record
from hpcddp.schedulers.row import QueueFound
from hpcddp.script.overlay import GONE
from hpcddp.script.site import Queue, Site
from hpcddp.units import format_count, format_walltime, parse_walltime


class Difference(Record):
    """`text`: what the file says and what was found. `correction`: the keys of an overlay that mend it; {}: a person
    has to."""

    text: str
    correction: Mapping[str, Any] = {}  # never written to


class ModulesFound(Record):
    """`missing`: a module of the file that is not there -> those of the same name that are. `problem`: why the module
    system could not be asked."""

    missing: Mapping[str, tuple[str, ...]] = {}  # never written to
    problem: str = ""


def compare_queues(site: Site, found: Sequence[QueueFound], asked: str) -> list[Difference]:
    """The differences of queues, their limits and their nodes. `asked`: the command that found them."""
    live = {queue.name: queue for queue in found}
    differences = []
    for name, queue in site.queues.items():
        if queue.partition:  # a QOS is in no list of partitions
            continue
        now = live.get(name)
        if now is None:
            gone = {"queues": {name: GONE}} if name != site.queue else {}
            differences.append(Difference(f"queue {name}: it is in the site's file, and not in {asked}", gone))
            continue
        if not now.is_open:
            differences.append(Difference(f"queue {name}: it takes no jobs now, by {asked}"))
        differences += _compare_limits(name, queue, now, asked)
        differences += _compare_nodes(name, site, now, asked)
    unknown = [name for name in live if name not in site.queues]
    if site.queues and unknown:
        listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        differences.append(Difference(f"not in the site's file: {listed} (by {asked})"))
    return differences


def unsaid_facts(site: Site, found: Sequence[QueueFound], asked: str) -> list[str]:
    """What the file says of nodes and the scheduler does not, in a line for each fact."""
    unsaid: dict[str, list[str]] = {}
    for now in found:
        if now.name in site.queues and not site.queues[now.name].partition:
            for _, word, said, live in _facts(now.name, site, now):
                unsaid.setdefault(word, []).extend([now.name] if said and live is None else [])
    verb = "do" if " and " in asked else "does"
    return [f"{word} of {', '.join(names)}: {asked} {verb} not say" for word, names in unsaid.items() if names]


def compare_modules(site: Site, found: ModulesFound) -> list[Difference]:
    """The modules of the file that are not there."""
    differences = []
    for module, others in found.missing.items():
        known = f"; there is {', '.join(others[:6])}" if others else ""
        correction: dict[str, Any] = {}
        if len(others) == 1:
            correction = {"modules": {"load": [others[0] if name == module else name for name in site.modules.load]}}
        differences.append(Difference(f"module {module} is not there{known}", correction))
    return differences


def read_modules(text: str, status: int) -> ModulesFound:
    """What the shell lines of `module_questions` have printed."""
    if "HPCDDP-NO-MODULES" in text or ("HPCDDP-ASKED" not in text):
        return ModulesFound(problem=f"the module system does not answer in a login shell (status {status})")
    missing: dict[str, tuple[str, ...]] = {}
    current = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("HPCDDP-MISSING "):
            current = line.partition(" ")[2]
            missing[current] = ()
        elif line.startswith("HPCDDP-"):
            current = ""
        elif current:
            name = re.sub(r"\((default|D|L)[^)]*\)$", "", line).rstrip("/").strip()
            if re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", name, re.ASCII) and name.split("/")[0] == current.split("/")[0]:
                missing[current] = (*missing[current], name)
    return ModulesFound({name: tuple(dict.fromkeys(others)) for name, others in missing.items()})


def module_questions(site: Site) -> str:
    """Shell lines for a login shell, which ask for each module of the file; its own first lines go before."""
    from hpcddp.script.words import quote_word

    asked = [
        f"module is-avail {quote_word(name)} >/dev/null 2>&1 || "
        f"{{ case $(module -t avail {quote_word(name)} 2>&1) in *{quote_word(name)}*) :;; *) "
        f"echo HPCDDP-MISSING {quote_word(name)}; module -t avail {quote_word(name.split('/')[0])} 2>&1;; esac; }}"
        for name in site.modules.load
    ]
    begin = [site.modules.init] if site.modules.init else []
    lines = [*begin, "type module >/dev/null 2>&1 || { echo HPCDDP-NO-MODULES; exit; }", *site.modules.before, *asked]
    return "\n".join([*lines, "echo HPCDDP-ASKED"]) + "\n"


def _compare_limits(name: str, queue: Queue, now: QueueFound, asked: str) -> list[Difference]:
    told, changed = list[str](), dict[str, str]()
    longest = max((rule.walltime_s for rule in queue.limits if rule.walltime_s is not None), default=None)
    live_s = None if now.walltime is None else parse_walltime(now.walltime, "walltime")
    if longest is not None and live_s is not None and longest != live_s:
        changed["walltime"] = format_walltime(live_s)
        told.append(f"walltime {format_walltime(longest)} in the site's file, {format_walltime(live_s)} by {asked}")
    most = max((rule.nodes[1] for rule in queue.limits if rule.nodes is not None), default=None)
    live = min((count for count in (now.most_nodes, now.nodes) if count), default=None)
    if most is not None and live is not None and (most > live or (now.most_nodes is not None and most < live)):
        first = next((rule.nodes[0] for rule in queue.limits if rule.nodes is not None), 1)
        changed["nodes"] = f"{first}-{live}" if live > first else str(live)
        told.append(f"at most {format_count(most, 'node')} in the site's file, {live} by {asked}")
    correction = _with_limit(name, queue, **changed)  # of all that differs: a rule is corrected as a whole
    return [Difference(f"queue {name}: {text}", correction) for text in told]


def _compare_nodes(name: str, site: Site, now: QueueFound, asked: str) -> list[Difference]:
    """What a node is said to have and has not. A file that asks for less than there is leaves it to the system. What
    only some of the nodes have, and whether there are GPUs at all, is a person's to correct."""
    differences = []
    for key, word, said, live in _facts(name, site, now):
        if said is None or live is None or not (said > live or (key == "gpus" and said != live and not now.mixed)):
            continue
        told = f"queue {name}: {said} {word} in each node in the site's file, {live} by {asked}"
        by_hand = now.mixed or (key == "gpus" and 0 in (said, live))
        differences.append(Difference(told, {} if by_hand else {"queues": {name: {key: str(live)}}}))
    return differences


def _facts(name: str, site: Site, now: QueueFound) -> list[tuple[str, str, int | None, int | None]]:
    """Key, word, what the file says, and what the scheduler does. What a request gets that names nothing says nothing
    of one that names it, or that has whole nodes."""
    queue = site.queues[name]
    facts = (
        ("gpus", "GPUs", "ngpus", queue.gpus, now.gpus),
        ("cpus", "CPUs", "ncpus", queue.cpus, now.cpus),
        ("mem_gb", "GB of memory", "mem", queue.mem_gb, now.mem_gb),
    )
    return [
        (key, word, said, None if key in now.defaults and (queue.exclusive or asked in site.chunk) else live)
        for key, word, asked, said, live in facts
    ]


def _with_limit(name: str, queue: Queue, **changed: str) -> dict[str, Any]:
    """The queue's only rule with other values; several rules are a person's to correct."""
    if len(queue.limits) != 1:
        return {}
    rule = queue.limits[0]
    said = {
        "nodes": "-".join(map(str, dict.fromkeys(rule.nodes))) if rule.nodes else None,
        "gpus": "-".join(map(str, dict.fromkeys(rule.gpus))) if rule.gpus else None,
        "walltime": format_walltime(rule.walltime_s) if rule.walltime_s else None,
        "least": format_walltime(rule.least_s) if rule.least_s else None,
        "node_hours": f"{rule.node_hours:g}" if rule.node_hours else None,
    }
    whole = {key: value for key, value in {**said, **changed}.items() if value is not None}
    return {"queues": {name: {"limits": [whole]}}}
