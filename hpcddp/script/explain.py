"""Where each line of a script came from: an option, the job file, the site and its source, or a default.

The script is rendered with a plan that notes which of its values the templates print; derived values are followed back
to the values that they are worked out from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hpcddp.script.plan import JobPlan
from hpcddp.script.render import FILTERS, printable, render_pieces
from hpcddp.script.site import Queue

# First lines that PBS ("directive error"), Grid Engine (an unknown option) and sbatch (no #!) refuse: `| qsub` by
# mistake queues nothing. hpcddp/cli/refusal.py has the measurements.
NO_SCRIPT = "#PBS hpcddp-explains-and-queues-nothing\n#$ -hpcddp-explains-and-queues-nothing\n"
_COLUMN = 76
# plan field -> the job-file key that it comes from, where they differ
_KEYS = {
    "walltime_s": "walltime",
    "threads_per_rank": "cpus_per_rank",
    "mem_gb": "mem_gb",
    "starter": "launcher",
    "account_option": "account",
    "signal_s": "signal",
}
_DEFAULTS = {
    "nodes": "default: 1",
    "ranks_per_node": "default: one per GPU",
    "name": "default: the script's name",
    "run_dir": "default: runs/NAME",
    "python": "default: the Python that runs hpcddp",
    "pythonpath": "default: where hpcddp is",
    "launcher": "default: the scheduler's",
}
# what is not the user's and not the site's
_FIXED = {"origin": "hpcddp itself", "request_yaml": "the request", "plan_json": "the decision"}


def explain_script(plan: JobPlan, asked: Mapping[str, str]) -> str:
    """Every line of the script, and beside it where its values came from. No scheduler takes the text for a job.

    `asked` says of each job-file key that was asked for where: `--nodes`, `nodes in job.yaml`.
    """
    lines = [f"{text:{_COLUMN}} | {'; '.join(why)}".rstrip(" |") if why else text for text, why in _lines(plan, asked)]
    head = f"site {plan.site.name}, {plan.site.file}\n"
    return NO_SCRIPT + head + "".join(f"{line}\n" for line in lines)


def _lines(plan: JobPlan, asked: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each line with the sources of what is printed in it, each once."""
    text = ""
    paths: list[str] = []
    for piece, printed in _watched_pieces(plan):
        for i, part in enumerate(piece.split("\n")):
            if i:
                yield text, list(dict.fromkeys(source_of(path, text, plan, asked) for path in paths))
                text, paths = "", []
            text += part
            paths += printed if part else ()


def _watched_pieces(plan: JobPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The pieces of the script, each with the paths of the plan's values that were printed in it."""
    seen: list[Read] = []
    printed: list[tuple[str, ...]] = []
    last: tuple[str, ...] = ()

    def finalize(value: object) -> object:
        nonlocal last
        last = seen[-1].paths if seen else last  # nothing read since: an item of the list that was read before
        printed.append(last)
        seen.clear()
        return printable(value)

    def whole(name: str, function: Callable[..., str]) -> Callable[..., str]:
        def call(value: object) -> str:
            if not isinstance(value, _Watched):
                return function(value)
            seen.append(Read((name,), None))
            return function(value._value)

        return call

    filters = {name: whole(name, function) for name, function in FILTERS.items()}
    for piece in render_pieces(plan.site.scheduler, _Watched(plan, "", seen), filters, finalize):
        if printed:
            yield piece, printed.pop()
        else:
            last = seen[-1].paths if seen else last
            yield piece, tuple(path for read in seen if read.value is True for path in read.paths if path != "env")
        printed.clear()
        seen.clear()


class Read(NamedTuple):
    """A value that was read of the plan, and the paths of the fields that it comes from."""

    paths: tuple[str, ...]
    value: object


class _Watched:
    """A frozen value that notes what is read of it."""

    def __init__(self, value: object, path: str, seen: list[Read]) -> None:
        self._value, self._path, self._seen = value, path, seen

    def __getattr__(self, name: str) -> Any:
        derived = getattr(type(self._value), name, None)
        if isinstance(derived, property) and derived.fget:
            parts: list[Read] = []
            value = derived.fget(_Watched(self._value, self._path, parts))
            # what it was worked out from; not the conditions that were false, nor what kind of site it is
            used = [p for p in parts if p.value and p.paths != ("site.scheduler",)]
            same = [p for p in used if p.value == value]
            paths = tuple(dict.fromkeys(path for part in same or used for path in part.paths))
        else:
            value = getattr(self._value, name)
            if callable(value):
                return lambda: _Watched(value(), self._path, self._seen)
            paths = (f"{self._path}{name}",)
        if dataclasses.is_dataclass(value):
            return _Watched(value, f"{self._path}{name}.", self._seen)
        self._seen.append(Read(paths, value))
        return value


def source_of(path: str, line: str, plan: JobPlan, asked: Mapping[str, str]) -> str:
    """Where one value of the plan, which is printed in `line`, came from, in words."""
    first, _, rest = path.partition(".")
    if first in _FIXED:
        return _FIXED[first]
    if first == "site":
        return _site_source(rest, plan)
    field = path.rpartition(".")[2]
    key = _KEYS.get(field, field)
    if key == "python" and "venv" in asked:
        key = "venv"
    if key == "env":
        variable = line.removeprefix("export ").partition("=")[0]
        of_site = variable in plan.site.env and variable not in (plan.spec.env or {})
        return _default(key, plan) if of_site else asked.get(f"env.{variable}") or asked.get("env", "the request")
    return asked[key] if key in asked else _default(key, plan)


def _site_source(rest: str, plan: JobPlan) -> str:
    """A field of the site: its block, and the source that the block names."""
    block = rest.partition(".")[0]
    value = getattr(plan.site, block, None)
    named = getattr(value, "source", "") or plan.site.cited.get(block, "")
    return f"site {plan.site.name}: {rest}" + (f" ({plan.site.source(named)})" if named else "")


def _default(key: str, plan: JobPlan) -> str:
    """What decided where nothing was asked: the site's queue or block, else hpcddp's own rule."""
    site, queue = plan.site, plan.site.queues.get(plan.queue, Queue())
    of_queue = {"gpus_per_node": queue.gpus, "cpus_per_rank": queue.cpus, "cpus_per_node": queue.cpus}
    if of_queue.get(key) is not None:
        cited = f" ({site.source(queue.source)})" if queue.source else ""
        return f"site {site.name}: queue {plan.queue}{cited}"
    of_site = {"walltime": "walltime", "queue": "queue", "modules": "modules", "env": "env", "directives": "directives",
               "chunk": "chunk", "bind": "launcher", "gpu_order": "gpu_order"}  # fmt: skip
    if key == "launcher" and plan.site.launcher.name == plan.launcher:
        return _site_source("launcher.name", plan)
    if key in of_site:
        return _site_source(of_site[key], plan)
    return _DEFAULTS.get(key, f"default: {key}")
