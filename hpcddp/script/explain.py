"""Where each line of a script came from: an option, the job file, the site and its source, or a default.

The script is rendered with a plan that notes which of its values the templates print; derived values are followed back
to the values that they are worked out from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hpcddp.runs.settings import ACCEPT, KEEP
from hpcddp.schedulers.registry import refused_lines
from hpcddp.script.container import Container
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.render import FILTERS, check_printed, make_environment, render_pieces
from hpcddp.script.scheduler_options import SchedulerOptions
from hpcddp.script.site import Account, Modules, Queue, Site, SiteContainer, SiteLauncher, SiteRendezvous, Staging
from hpcddp.script.spec import JobSpec

_COLUMN = 76
# plan field -> the job-file key that it comes from, where they differ
_KEYS = {
    "walltime_s": "walltime",
    "job_name": "name",
    "threads_per_rank": "cpus_per_rank",
    "mem_gb": "mem_gb",
    "outer_launcher": "launcher",
    "account_option": "account",
    "signal_s": "signal",
    "allocated_nodes": "nodes",
    "stall_limit_s": "stall_limit",
    "fewer_nodes": "min_nodes",
}
# what decides how a launcher's line is made, and is not printed in it
_KINDS = {("site.scheduler",), ("outer_launcher",), ("launcher",)}


def explain_script(plan: JobPlan) -> str:
    """Every line of the script, and beside it where its values came from. No scheduler takes the text for a job."""
    lines = [f"{text:{_COLUMN}} | {'; '.join(why)}".rstrip(" |") if why else text for text, why in _lines(plan)]
    corrected = f", corrected by {plan.site.overlay}" if plan.site.overlay else ""
    head = f"site {plan.site.name}, {plan.site.file}{corrected}\n"
    refused = refused_lines("hpcddp-explains-and-queues-nothing") + "exit 2\n"  # it ends a shell at once
    return refused + head + "".join(f"{line}\n" for line in lines)


def _lines(plan: JobPlan) -> Iterator[tuple[str, list[str]]]:
    """Each line with the sources of what is printed in it, each once."""
    text, sources = "", list_plan_sources(plan)
    paths: list[str] = []
    for piece, printed in _watched_pieces(plan):
        for i, part in enumerate(piece.split("\n")):
            if i:
                yield text, list(dict.fromkeys(_source_of(path, text, plan, sources) for path in paths))
                text, paths = "", []
            text += part
            paths += printed if part else ()


def _watched_pieces(plan: JobPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The pieces of the script, each with the paths of the plan's values that were printed in it."""
    reads: list[Read] = []
    printed: list[tuple[str, ...]] = []
    last: tuple[str, ...] = ()

    def finalize(value: object) -> object:
        nonlocal last
        last = reads[-1].paths if reads else last  # nothing read since: an item of the list that was read before
        printed.append(last)
        reads.clear()
        return check_printed(value)

    def whole(name: str, function: Callable[..., str]) -> Callable[..., str]:
        def call(value: object) -> str:
            if not isinstance(value, _Watched):
                return function(value)
            reads.append(Read((name,), None))
            return function(value._value)

        return call

    filters = {name: whole(name, function) for name, function in FILTERS.items()}
    environment = make_environment(filters, finalize)
    for piece in render_pieces(plan.site.scheduler, _Watched(plan, "", reads), environment):
        if printed:
            yield piece, printed.pop()
        else:
            last = reads[-1].paths if reads else last
            yield piece, tuple(path for read in reads if read.value is True for path in read.paths if path != "env")
        printed.clear()
        reads.clear()


# The parts of a plan that hold values of their own.
_PARTS = (
    Site,
    Account,
    Modules,
    SiteLauncher,
    SiteRendezvous,
    Staging,
    SiteContainer,
    JobSpec,
    SchedulerOptions,
    Container,
)


class Read(NamedTuple):
    """A value that was read of the plan, and the paths of the fields that it comes from."""

    paths: tuple[str, ...]
    value: object


class _Watched:
    """A frozen value that notes what is read of it."""

    def __init__(self, value: object, path: str, reads: list[Read]) -> None:
        self._value, self._path, self._reads = value, path, reads

    def __getattr__(self, name: str) -> Any:
        derived = getattr(type(self._value), name, None)
        if isinstance(derived, property) and derived.fget:
            parts: list[Read] = []
            value = derived.fget(_Watched(self._value, self._path, parts))
            if isinstance(value, Iterator):  # its items are worked out when they are printed
                return self._items(value, parts)
            # what it was worked out from; not the conditions that were false, nor what kind of site it is
            used = [p for p in parts if p.value and p.paths != ("site.scheduler",)]
            same = [p for p in used if p.value == value]
            paths = tuple(dict.fromkeys(path for part in same or used for path in part.paths))
        else:
            value = getattr(self._value, name)
            if callable(derived):  # a method
                return lambda: _Watched(value(), self._path, self._reads)
            paths = (f"{self._path}{name}",)
        if isinstance(value, _PARTS):
            return _Watched(value, f"{self._path}{name}.", self._reads)
        self._reads.append(Read(paths, value))
        return value

    def _items(self, items: Iterator[object], parts: list[Read]) -> Iterator[object]:
        """The items of a lazy value, each noted with the paths that were read to make it."""
        for item in items:
            used = [p for p in parts if p.value and p.paths not in _KINDS]
            self._reads.append(Read(tuple(dict.fromkeys(path for part in used for path in part.paths)), item))
            parts.clear()
            yield item


def _source_of(path: str, line: str, plan: JobPlan, sources: Mapping[str, str]) -> str:
    """Where one value of the plan, which is printed in `line`, came from, in words."""
    first, _, rest = path.partition(".")
    if first == "planned_by":
        return "hpcddp itself"
    if first == "site":
        return _site_source(rest, plan)
    field = path.rpartition(".")[2]
    key = _KEYS.get(field, field)
    if key == "env":
        key = f"env.{line.removeprefix('export ').partition('=')[0]}"
        return sources.get(key, sources["env"])
    return sources.get(key, f"default: {key}")


# Where each value of a plan came from: an option, a key of the job file, the site's file and its source, a default.


_DEFAULTS = {
    "nodes": "default: 1",
    "ranks_per_node": "default: one per GPU",
    "name": "default: made from the command",
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


def list_plan_sources(plan: JobPlan) -> dict[str, str]:
    """Job-file key -> where its value came from; `env.NAME` for each variable that the job or the site sets."""
    requested = plan.spec.sources
    sources = {**{key: _default(key, plan) for key in _DECIDED}, **requested}
    python = next((key for key in ("venv", "conda") if key in requested), None)
    if python:
        sources["python"] = requested[python]
    variables = {
        "HPCDDP_GPUS_PER_RANK": "gpus_per_rank",
        "HPCDDP_INDEPENDENT": "independent",
        "HPCDDP_PARALLEL": "parallel",
        ACCEPT: "accept" if "accept" in requested else "resume",
        KEEP: "keep",
    }
    sources.update({f"env.{name}": requested[key] for name, key in variables.items() if key in requested})
    for name in plan.site.env:
        sources[f"env.{name}"] = _site_source("env", plan)
    for name in plan.spec.env or ():
        sources[f"env.{name}"] = requested.get(f"env.{name}") or requested.get("env", "the request")
    return sources


def _site_source(path: str, plan: JobPlan) -> str:
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
        return _site_source("launcher.name", plan)
    return _site_source(_OF_SITE[key], plan) if key in _OF_SITE else _DEFAULTS.get(key, f"default: {key}")
