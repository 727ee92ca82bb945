"""A site's file against what its scheduler and its module system say now: text in, differences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.record import Record
from hpcddp.schedulers.row import QueueFound
from hpcddp.script.overlay import GONE
from hpcddp.script.site import Queue, Site
from hpcddp.units import format_count, format_walltime, parse_walltime

#: The name under which an overlay keeps where a correction is from.
CHECKED = "checked"
_NEAR = 0.9  # of the memory that is installed, the system and the scheduler keep a part; guides count it in GB or GiB


class Difference(Record):
    """`text`: what the file says and what was found. `correction`: the keys of an overlay that mend it; {}: a person
    has to."""

    text: str
    correction: Mapping[str, Any] = {}  # never written to


def compare_queues(site: Site, found: Sequence[QueueFound], asked: str) -> list[Difference]:
    """The differences of queues, their limits and their nodes. `asked`: the command that found them."""
    live = {queue.name: queue for queue in found}
    differences = []
    listed = [queue.partition or name for name, queue in site.queues.items() if not queue.qos]
    if listed and not live.keys() & set(listed):
        return [Difference(f"none of the queues of the site's file is in {asked}: this may be another machine")]
    for name, queue in site.queues.items():
        if queue.qos:  # a QOS is in no list of partitions
            continue
        now = live.get(queue.partition or name)
        if now is None:
            gone = {"queues": {name: GONE}} if name != site.queue else {}
            differences.append(Difference(f"queue {name}: it is in the site's file, and not in {asked}", gone))
            continue
        if not now.is_open:
            differences.append(Difference(f"queue {name}: it takes no jobs now, by {asked}"))
        differences += _compare_limits(name, queue, now, asked)
        differences += _compare_nodes(name, site, now, asked)
    return differences


def unsaid_facts(site: Site, found: Sequence[QueueFound], asked: str) -> list[str]:
    """What the file says of nodes and the scheduler does not, in a line for each fact."""
    unsaid: dict[str, list[str]] = {}
    live_queues = {now.name: now for now in found}
    for name, queue in site.queues.items():
        now = live_queues.get(queue.partition or name)
        if now is not None and not queue.qos:
            for _, word, said, live in _facts(name, site, now):
                unsaid.setdefault(word, []).extend([name] if said and live is None else [])
    verb = "do" if " and " in asked else "does"
    return [f"{word} of {', '.join(names)}: {asked} {verb} not say" for word, names in unsaid.items() if names]


def unlisted_queues(site: Site, found: Sequence[QueueFound], asked: str) -> list[str]:
    """Queues that the file leaves out, as many do: for people, it is no difference."""
    known = {queue.partition or name for name, queue in site.queues.items()}
    unknown = [queue.name for queue in found if queue.name not in known]
    listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    return [f"not in the site's file: {listed} (by {asked})"] if unknown else []


def _compare_limits(name: str, queue: Queue, now: QueueFound, asked: str) -> list[Difference]:
    """A limit that is wider now is a person's to correct: a QOS or a rule of people may be what the file says."""
    told, changed = list[tuple[str, bool]](), dict[str, str]()
    longest = max((rule.walltime_s for rule in queue.limits if rule.walltime_s is not None), default=None)
    live_s = None if now.walltime is None else parse_walltime(now.walltime, "walltime")
    if longest is not None and live_s is not None and longest != live_s:
        changed.update({"walltime": format_walltime(live_s)} if live_s < longest else {})
        text = f"walltime {format_walltime(longest)} in the site's file, {format_walltime(live_s)} by {asked}"
        told.append((text, live_s < longest))
    most = max((rule.nodes[1] for rule in queue.limits if rule.nodes is not None), default=None)
    live = min((count for count in (now.most_nodes, now.nodes) if count), default=None)
    if most is not None and live is not None and (most > live or (now.most_nodes is not None and most < live)):
        first = next((rule.nodes[0] for rule in queue.limits if rule.nodes is not None), 1)
        changed.update({"nodes": f"{first}-{live}" if live > first else str(live)} if live < most else {})
        told.append((f"at most {format_count(most, 'node')} in the site's file, {live} by {asked}", live < most))
    correction = _with_limit(name, queue, **changed)  # of all that is tighter: a rule is corrected as a whole
    return [Difference(f"queue {name}: {text}", correction if tighter else {}) for text, tighter in told]


def _compare_nodes(name: str, site: Site, now: QueueFound, asked: str) -> list[Difference]:
    """What a node is said to have and has not. A file that asks for less than there is leaves it to the system. What
    only some of the nodes have, and whether there are GPUs at all, is a person's to correct."""
    differences = []
    for key, word, said, live in _facts(name, site, now):
        if said is None or live is None:
            continue
        near = _NEAR if key == "mem_gb" and "mem" not in site.chunk and not site.asks_memory else 1
        if not (said * near > live or (key == "gpus" and said != live and not now.mixed)):
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
