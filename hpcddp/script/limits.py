"""A queue's rules against a request: what breaks one is refused, with its source and the nearest request that fits."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.script.site import Limit, Site
from hpcddp.units import format_walltime


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
        raise RequestError(
            f"queue {queue} of site {site.name} takes {', '.join(_size(r) for r in rules)} per job,"
            f" not {_asked(rules, nodes, gpus)} ({source}){lost}",
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


def _asked(rules: tuple[Limit, ...], nodes: int, gpus: int) -> str:
    return f"{nodes}" if not any(r.gpus for r in rules) else f"{nodes} with {_span((gpus, gpus), 'GPU')}"


def _size(rule: Limit) -> str:
    spans = [_span(span, word) for span, word in ((rule.nodes, "node"), (rule.gpus, "GPU")) if span]
    return " and ".join(spans) or "any size"


def _span(span: tuple[int, int], word: str) -> str:
    first, last = span
    if first == last:
        return f"{first} {word}" if first == 1 else f"{first} {word}s"
    return f"{first} to {last} {word}s"
