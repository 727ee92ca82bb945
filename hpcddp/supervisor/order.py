"""What a job script asks of the supervisor: the options of `hpcddp supervise`, and the launcher's line behind `--`.

Nothing else says it: what a person changes in these words is what the job does, and what its records say.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.allocation import find_allocation
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.command import check_name, name_command
from hpcddp.runs.folder import RUNS
from hpcddp.schedulers.registry import find_current_job, find_scheduler
from hpcddp.supervisor.line import read_line
from hpcddp.supervisor.notice import read_notify
from hpcddp.sweep import check_axes, count_points, find_point, format_point, read_axes
from hpcddp.units import parse_count, parse_walltime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from hpcddp.supervisor.line import Line
    from hpcddp.supervisor.notice import Notify

_NOTHING: Mapping[str, Any] = {}
_TEXTS = ("name", "run_dir", "scheduler", "launcher", "site", "resume", "scratch", "health_check", "fresh")
_COUNTS = ("chain", "max_restarts")
_TIMES = ("walltime", "signal", "stall_limit")


class Order(Record):
    """The options of `hpcddp supervise`, as `hpcddp supervise --help` says them, and the launcher's line.

    `name`: the run's, below `runs/`; else `run_dir` is its folder. `submit_options`: further options of the command
    that queues the next job of a chain. `fresh`: the stamp of a --fresh that was typed. `sweep`: the axes, name ->
    values, where the job is a point of one; `point`: its values.
    """

    scheduler: str
    launcher: str
    line: Line
    name: str = ""
    run_dir: str = ""
    site: str = ""
    walltime_s: int | None = None
    signal_s: int = 0
    chain: int = 0
    submit_options: tuple[str, ...] = ()
    fresh: str = ""
    resume: bool = False
    scratch: bool = False
    max_restarts: int = 0
    fewer_nodes: tuple[int, ...] = ()
    stall_limit_s: int = 60
    health_check: str = ""
    notify: Notify | None = None
    sweep: Mapping[str, Sequence[str]] = _NOTHING
    point: Mapping[str, str] = _NOTHING


def read_order(options: Mapping[str, Any], words: Sequence[str], env: Mapping[str, str]) -> Order:
    """The order that these options and words make. RequestError for one that is wrong."""
    fewer = read_axes({"nodes": options["fewer_nodes"]}, "--fewer-nodes")["nodes"] if options.get("fewer_nodes") else ()
    values: dict[str, Any] = {
        **{key: options[key] for key in _TEXTS if options.get(key)},
        **{key: parse_count(options[key], _name(key)) for key in _COUNTS if options.get(key)},
        **{f"{key}_s": parse_walltime(options[key], _name(key)) for key in _TIMES if options.get(key)},
        "submit_options": tuple(options.get("submit_option") or ()),
        "fewer_nodes": tuple(parse_count(number, "--fewer-nodes") for number in fewer),
        "sweep": _read_sweep(options.get("sweep") or ()),
        "notify": read_notify(options["notify"], "--notify") if options.get("notify") else None,
    }
    line = read_line(words, options["launcher"], lambda: _count_hosts(options["scheduler"], env))
    order = Order(line=line, **values)
    if not (order.name or order.run_dir):
        raise RequestError("the words of hpcddp supervise name no run", f"--name {name_command(line.command)}")
    if order.name:
        check_name(re.sub(r"\.[0-9]+$", "", order.name), "--name", "--name {}")
    if count_points(order.sweep) > 1:
        check_axes(order.sweep, order.line.command, ())
    return order


def find_folder(order: Order, env: Mapping[str, str]) -> str:
    """The run's folder, without the index of an array. The job's own spelling of its working directory is taken, which
    other hosts may know alone."""
    here, said = os.getcwd(), env.get("PWD", "")
    with suppress(OSError):
        here = said if os.path.isabs(said) and os.path.samefile(said, here) else here
    return os.path.join(here, os.path.join(RUNS, order.name) if order.name else order.run_dir)


def job_record(order: Order, run_dir: str) -> dict[str, Any]:
    """What plan.json holds of a job that runs. `run_dir`: the folder that was asked for."""
    line = order.line
    return {
        "site": order.site,
        "scheduler": order.scheduler,
        "launcher": line.agent or order.launcher,
        "nodes": line.nodes,
        "ranks_per_node": line.ranks_per_node,
        "world_size": line.world_size,
        "gpus_per_node": line.gpus_per_node,
        "global_batch": line.global_batch,
        "command": list(line.command),
        "run_dir": run_dir,
        **({"point": dict(order.point)} if order.point else {}),
    }


def take_index(order: Order, env: Mapping[str, str], tell: Callable[[str], None]) -> Order:
    """The order with the values of this job's index in its command. LaunchError outside of an array."""
    if not order.sweep:
        return order
    points = count_points(order.sweep)
    job = find_current_job(env) if points > 1 else None
    index = (job.array_index if job is not None else "") if points > 1 else "1"
    if not index:
        raise LaunchError(
            f"this script is an array of {points} jobs, one for each point of a sweep, and this job has no index",
            "submit it: hpcddp submit, or to the scheduler as it is",
        )
    point = find_point(order.sweep, int(index))
    tell(f"point {index} of {points}: {format_point(point)}" if points > 1 else f"sweep: {format_point(point)}")
    return order._replace(point=point, line=order.line.fill(point))


def _count_hosts(scheduler: str, env: Mapping[str, str]) -> int:
    """The number of hosts of the job; 0 where nobody lists them."""
    found = None if find_scheduler(scheduler).this_machine else find_allocation(env)
    return len(found.hosts or ()) if found is not None else 0


def _name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _read_sweep(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    axes: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or value in axes.get(name, ()):
            raise RequestError(f"--sweep {word!r} is no further value of a name", "--sweep lr=0.1 --sweep lr=0.01")
        axes[name] = (*axes.get(name, ()), value)
    return axes
