"""Source of each value of a job: an option, the job file, the site and its source, or a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.schedulers.registry import refused_lines
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.spec import FIELDS, quote_words
from hpcddp.units import format_walltime

# job-file key -> hpcddp's own rule, where neither the job nor the site decides
_RULES = {
    "name": "made from the command",
    "nodes": "1",
    "ranks_per_node": "one per GPU",
    "cpus_per_node": "what its ranks take",
    "cpus_per_rank": "its share of the node",
    "launcher": "the scheduler's",
    "python": "the Python that runs hpcddp",
    "pythonpath": "where hpcddp is",
    "run_dir": "runs/NAME",
}
_ASKED_OR_OF_SITE = ("account", "queue", "gpus_per_node", "mem_gb", "walltime", "modules", "directives", "gpu_order")
# What the script has of the site's file alone; the part before the dot is the block.
_OF_SITE = ("modules.init", "modules.before", "modules.after", "launcher.options", "prepend", "rendezvous.variables")


def explain_plan(plan: JobPlan) -> str:
    """A line for each value: its key, the value, and where that came from. No scheduler takes the text for a job."""
    rows = [(key, shown, source) for key, value, source in list_values(plan) if (shown := _show(key, value))]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    corrected = f", corrected by {plan.site.overlay}" if plan.site.overlay else ""
    refused = refused_lines("hpcddp-explains-and-queues-nothing") + "exit 2\n"  # it ends a shell at once
    head = f"site {plan.site.name}, {plan.site.file}{corrected}\n"
    lines = (f"{key:{widths[0]}}  {shown:{widths[1]}}  {source}\n" for key, shown, source in rows)
    return refused + head + "".join(lines)


def list_values(plan: JobPlan) -> Iterator[tuple[str, object, str]]:
    """(key, value, where it came from) of what is decided, of what else the job asks for, and of each variable."""
    spec, site, queue = plan.spec, plan.site, plan.queue_profile
    sources = {key: source for key, source in spec.sources.items() if key.partition(".")[0] != "env"}
    sources["python"] = next((sources[key] for key in ("python", "venv", "conda") if key in sources), "")
    of_queue = {"gpus_per_node": queue.gpus, "cpus_per_node": queue.cpus, "cpus_per_rank": queue.cpus}
    for key in (*_ASKED_OR_OF_SITE, *_RULES):
        if of_queue.get(key) is not None:
            rule = f"site {site.name}: queue {plan.queue} ({site.source(queue.source)})"
        elif key in _RULES and (key != "launcher" or site.launcher.name != plan.launcher):
            rule = f"default: {_RULES[key]}"
        else:
            rule = _site_source(plan, key)
        yield key, getattr(plan, FIELDS.get(key, key)), sources.pop(key, "") or rule
    for key, source in sources.items():
        block, _, axis = key.partition(".")
        value: Any = plan.words[key] if key in plan.words else getattr(spec, FIELDS[block])
        yield key, value[axis] if axis else value, source
    for path in _OF_SITE:
        value = site
        for name in path.split("."):
            value = getattr(value, name)
        yield path, value, _site_source(plan, path)
    for name, value in {**site.env, **(spec.env or {})}.items():
        asked = spec.sources.get(f"env.{name}") or spec.sources.get("env", "the request")
        yield f"env.{name}", value, asked if name in (spec.env or {}) else _site_source(plan, "env")


def _site_source(plan: JobPlan, path: str) -> str:
    """A key of the site's file, and the source that its block names: `site abci3: walltime (https://…, 2026-07-01)`."""
    block = path.partition(".")[0]
    named = getattr(getattr(plan.site, block, None), "source", "") or plan.site.cited.get(block, "")
    return f"site {plan.site.name}: {path}" + (f" ({plan.site.source(named)})" if named else "")


def _show(key: str, value: object) -> str:
    """A value in one line; "" for none."""
    if isinstance(value, int) and FIELDS.get(key, key) != key:
        return format_walltime(value)
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, tuple | list):
        return quote_words("=".join(word) if isinstance(word, tuple) else str(word) for word in value)
    is_said = value not in (None, "") and (key, value) != ("mem_gb", 0)
    return "" if not is_said else str(value).lower() if isinstance(value, bool) else str(value)
