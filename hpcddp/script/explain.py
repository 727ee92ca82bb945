"""Where each line of a script came from: an option, the job file, the site and its source, or a default.

The script is rendered with a plan that notes which of its values the templates print; derived values are followed back
to the values that they are worked out from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hpcddp.schedulers.registry import refused_lines
from hpcddp.script.container import Container
from hpcddp.script.jobplan import plan_record
from hpcddp.script.plan import JobPlan, site_source
from hpcddp.script.render import FILTERS, printable, render_pieces
from hpcddp.script.scheduler_options import SchedulerOptions
from hpcddp.script.site import Account, Modules, Site, SiteContainer, SiteLauncher, SiteRendezvous, Staging
from hpcddp.script.spec import JobSpec


def no_script() -> str:
    """First lines with which an explanation is no job script to any scheduler, and ends a shell at once."""
    return refused_lines("hpcddp-explains-and-queues-nothing") + "exit 2\n"


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
    return no_script() + head + "".join(f"{line}\n" for line in lines)


def explain_record(plan: JobPlan) -> dict[str, Any]:
    """The same as JSON values."""
    lines = [{"text": text, "sources": why} for text, why in _lines(plan)]
    return {"site": plan.site.name, "file": plan.site.file, "lines": lines}


def _lines(plan: JobPlan) -> Iterator[tuple[str, list[str]]]:
    """Each line with the sources of what is printed in it, each once."""
    text = ""
    paths: list[str] = []
    for piece, printed in _watched_pieces(plan):
        for i, part in enumerate(piece.split("\n")):
            if i:
                yield text, list(dict.fromkeys(source_of(path, text, plan) for path in paths))
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
        return printable(value)

    def whole(name: str, function: Callable[..., str]) -> Callable[..., str]:
        def call(value: object) -> str:
            if not isinstance(value, _Watched):
                return function(value)
            reads.append(Read((name,), None))
            return function(value._value)

        return call

    filters = {name: whole(name, function) for name, function in FILTERS.items()}
    for piece in render_pieces(plan.site.scheduler, _Watched(plan, "", reads), filters, finalize):
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


def source_of(path: str, line: str, plan: JobPlan) -> str:
    """Where one value of the plan, which is printed in `line`, came from, in words."""
    first, _, rest = path.partition(".")
    if first == "planned_by":
        return "hpcddp itself"
    if first == "site":
        return site_source(rest, plan)
    field = path.rpartition(".")[2]
    key = _KEYS.get(field, field)
    if key == "env":
        key = f"env.{line.removeprefix('export ').partition('=')[0]}"
        return plan.sources.get(key, plan.sources["env"])
    return plan.sources.get(key, f"default: {key}")


# What changes when the same request goes to another site.


def compare_plans(first: tuple[JobPlan, str], second: tuple[JobPlan, str]) -> str:
    """Two plans and their scripts: the decisions that differ, then a unified diff. No scheduler takes it for a job."""
    record = comparison_record(first, second)
    differing = [
        (name, *("-" if value is None else str(value) for value in values))
        for name, values in record["differing"].items()
    ]
    widths = [max((len(row[i]) for row in differing), default=0) for i in (0, 1)]
    table = "".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}\n" for a, b, c in differing)
    return no_script() + table + "\n" + "".join(f"{line}\n" for line in record["script_diff"])


def comparison_record(first: tuple[JobPlan, str], second: tuple[JobPlan, str]) -> dict[str, Any]:
    """The same as JSON values; in `differing` the first plan's value and the second's."""
    (one, one_script), (two, two_script) = first, second
    records = plan_record(one), plan_record(two)
    pairs = {name: [record.get(name) for record in records] for name in dict.fromkeys([*records[0], *records[1]])}
    lines = difflib.unified_diff(
        one_script.splitlines(), two_script.splitlines(), one.site.name, two.site.name, lineterm="", n=1
    )
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name != "created_by"}
    return {"sites": [one.site.name, two.site.name], "differing": differing, "script_diff": list(lines)}
