"""Where each value of a plan came from: an option, a key of the job file, the site's file and its source, a default."""

from __future__ import annotations

from hpcddp.script.jobplan import JobPlan
from hpcddp.script.site import Queue

_DEFAULTS = {
    "nodes": "default: 1",
    "ranks_per_node": "default: one per GPU",
    "name": "default: the script's name",
    "run_dir": "default: runs/NAME",
    "python": "default: the Python that runs hpcddp",
    "pythonpath": "default: where hpcddp is",
    "launcher": "default: the scheduler's",
    "min_nodes": "default: half of the nodes",
}
# job-file key -> the site's block that decides it where the job asks for nothing
_OF_SITE = {
    "walltime": "walltime",
    "queue": "queue",
    "modules": "modules",
    "env": "env",
    "directives": "directives",
    "chunk": "chunk",
    "bind": "launcher",
    "gpu_order": "gpu_order",
}
# What every plan decides, by job-file key or, where there is none, by the plan's own word.
_DECIDED = (*_DEFAULTS, *_OF_SITE, "gpus_per_node", "cpus_per_node", "cpus_per_rank", "mem_gb", "account")


def plan_sources(plan: JobPlan) -> dict[str, str]:
    """Job-file key -> where its value came from; `env.NAME` for each variable that the job or the site sets."""
    asked = plan.spec.sources
    sources = {**{key: _default(key, plan) for key in _DECIDED}, **asked}
    python = next((key for key in ("venv", "uv", "conda") if key in asked), None)
    if python:
        sources["python"] = asked[python]
    own = {
        "HPCDDP_GPUS_PER_RANK": "gpus_per_rank",
        "HPCDDP_INDEPENDENT": "independent",
        "HPCDDP_PARALLEL": "parallel",
    }
    sources.update({f"env.{name}": asked[key] for name, key in own.items() if key in asked})
    for name in plan.site.env:
        sources[f"env.{name}"] = site_source("env", plan)
    for name in plan.spec.env or ():
        sources[f"env.{name}"] = asked.get(f"env.{name}") or asked.get("env", "the request")
    return sources


def site_source(path: str, plan: JobPlan) -> str:
    """A field of the site, and the source that its block names: `site abci3: walltime (https://…, 2026-07-01)`."""
    block = path.partition(".")[0]
    value = getattr(plan.site, block, None)
    named = getattr(value, "source", "") or plan.site.cited.get(block, "")
    return f"site {plan.site.name}: {path}" + (f" ({plan.site.source(named)})" if named else "")


def _default(key: str, plan: JobPlan) -> str:
    """What decided where nothing was asked: the site's queue or block, else hpcddp's own rule."""
    site, queue = plan.site, plan.site.queues.get(plan.queue, Queue())
    of_queue = {"gpus_per_node": queue.gpus, "cpus_per_rank": queue.cpus, "cpus_per_node": queue.cpus}
    if of_queue.get(key) is not None:
        cited = f" ({site.source(queue.source)})" if queue.source else ""
        return f"site {site.name}: queue {plan.queue}{cited}"
    if key == "launcher" and site.launcher.name == plan.launcher:
        return site_source("launcher.name", plan)
    return site_source(_OF_SITE[key], plan) if key in _OF_SITE else _DEFAULTS.get(key, f"default: {key}")
