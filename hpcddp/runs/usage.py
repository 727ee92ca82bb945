"""Use of a run's resources, and what to request next time."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeAlias

from hpcddp.errors import HpcddpError
from hpcddp.ranks.gpus import find_gpu_type
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.lock import Hold, read_holds
from hpcddp.runs.metrics import MetricsReader
from hpcddp.runs.state import read_plan_file, read_state, read_versions
from hpcddp.runs.submitted import read_job_end, read_submissions
from hpcddp.units import format_count, format_walltime

Steps: TypeAlias = list[tuple[int, float]]  # each one that an attempt made, and when
_GB = 1e9
_MIB = 1 << 20
_PHASES = ("start-up", "input", "compute", "communication", "checkpoint")
_MARGIN = 1.2  # of what was used, for what to ask next time
_FEW = 0.7  # of what was asked: it is worth asking for less


class NodeUse(Record):
    """Use of one host by an attempt. `cpus`: that it may use. Bytes; shares from 0 to 1. `phases`: seconds."""

    host: str
    seconds: float
    cpus: int
    cpu_s: float
    memory: int
    limit: int | None
    gpus: tuple[tuple[str, float, float, float], ...]  # name, use, memory used and there
    phases: tuple[float, ...]


class AttemptUse(Record):
    """One attempt. `lost_s`: of its end, what a later one had to do again, or nobody has yet."""

    name: str
    begins: float
    seconds: float
    nodes: int
    lost_s: float
    used: tuple[NodeUse, ...]


class Efficiency(Record):
    """A run over all its attempts. None: not known. `phases`: name -> share of the time of all of them."""

    run: str
    attempts: tuple[AttemptUse, ...]
    node_hours: float
    lost_node_hours: float
    cpu_use: float | None
    cpus: int | None  # of a node
    gpu_use: float | None
    gpu_memory: tuple[float, float] | None  # MiB: the most on one, and what that has
    memory: int | None  # the most on one node, in bytes
    memory_limit: int | None
    samples_per_s: float | None
    mfu: float | None
    phases: Mapping[str, float]
    advice: tuple[str, ...]


def read_efficiency(run: RunFolder, *, reads_steps: bool = True) -> Efficiency:
    """SchemaError; what else cannot be read is not known. `reads_steps`: else speed and lost time are not known."""
    holds = read_holds(run)
    made = [_read_steps(run.attempt(hold.holder.attempt)) if reads_steps else [] for hold in holds]
    attempts = _read_attempts(run, holds, made)
    nodes = [node for one in attempts for node in one.used]
    cpu_there = sum(node.cpus * node.seconds for node in nodes)
    gpus = [(gpu, node.seconds) for node in nodes for gpu in node.gpus]
    gpu_s = sum(seconds for _, seconds in gpus)
    speed, mfu = _find_speed(run, attempts, made)
    found = Efficiency(
        run=run.path,
        attempts=tuple(attempts),
        node_hours=sum(one.seconds * one.nodes for one in attempts) / 3600,
        lost_node_hours=sum(one.lost_s * one.nodes for one in attempts) / 3600,
        cpu_use=sum(node.cpu_s for node in nodes) / cpu_there if cpu_there else None,
        cpus=max((node.cpus for node in nodes), default=None),
        gpu_use=sum(gpu[1] / 100 * seconds for gpu, seconds in gpus) / gpu_s if gpu_s else None,
        gpu_memory=max(((gpu[2], gpu[3]) for gpu, _ in gpus), default=None),
        memory=max((node.memory for node in nodes), default=None),
        memory_limit=max((node.limit for node in nodes if node.limit), default=None),
        samples_per_s=speed,
        mfu=mfu,
        phases=_share_phases(attempts),
        advice=(),
    )
    return found._replace(advice=tuple(_advise(found, run, holds)))


def _read_attempts(run: RunFolder, holds: Sequence[Hold], made: Sequence[Steps]) -> list[AttemptUse]:
    saved: int | None = None  # the last step that nobody has to do again; of one that runs nobody knows
    with suppress(HpcddpError):
        state = read_state(run) if holds and holds[-1].end is not None else None
        saved = None if state is None else state.step
    found = []
    for nth, hold in enumerate(holds):
        attempt, steps = run.attempt(hold.holder.attempt), made[nth]
        begins, ends = _read_times(attempt, hold)
        good = next((later[0][0] - 1 for later in made[nth + 1 :] if later), saved)
        lost_s = 0.0
        if steps and good is not None and steps[-1][0] > good:
            lost_s = ends - max((at for step, at in steps if step <= good), default=begins)
        used, job = _read_nodes(attempt), read_job_end(attempt)
        nodes = max(len(used), job.nodes if job is not None else 1)
        found.append(AttemptUse(attempt.name, begins, ends - begins, nodes, lost_s, tuple(used)))
    return found


def _read_times(attempt: AttemptFolder, hold: Hold) -> tuple[float, float]:
    begins, ends = hold.begin_s, hold.end_s
    if ends is None:
        files = (attempt.metrics, attempt.log, *_list_usage(attempt))
        ends = max((os.stat(file).st_mtime for file in files if os.path.exists(file)), default=begins)
    return begins, max(min(ends, time.time()), begins)


def _read_steps(attempt: AttemptFolder) -> Steps:
    with suppress(HpcddpError):
        lines = MetricsReader(attempt.metrics).read()
        return [(line.step, line.time) for line in lines if line.is_progress]
    return []


def _list_usage(attempt: AttemptFolder) -> list[str]:
    begin, end = os.path.basename(attempt.usage("")).split(".")
    with suppress(OSError):
        names = sorted(os.listdir(attempt.path))
        return [os.path.join(attempt.path, one) for one in names if one.startswith(begin) and one.endswith(f".{end}")]
    return []


def _read_nodes(attempt: AttemptFolder) -> list[NodeUse]:
    found = []
    for path in _list_usage(attempt):
        lines = []
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                with suppress(ValueError):  # half a line of a node that was lost
                    lines.append(json.loads(text))
        with suppress(KeyError, TypeError, ValueError):
            found += [_sum_up(lines)] if lines else []
    return found


def _sum_up(lines: Sequence[dict[str, Any]]) -> NodeUse:
    last = lines[-1]
    gpus = []
    for nth, (name, *_, there) in enumerate(last["gpus"]):
        rows = [(line["gpus"][nth], line["looks"]) for line in lines if len(line["gpus"]) > nth]
        use = sum(row[1] * count for row, count in rows) / sum(count for _, count in rows)
        gpus.append((name, use, max(row[2] for row, _ in rows), there))
    return NodeUse(
        last["host"],
        last["elapsed_s"],
        max(line["cpus"] for line in lines),
        max(line["cpu_s"] for line in lines),
        max(line["memory"] for line in lines),
        next((line["limit"] for line in reversed(lines) if "limit" in line), None),
        tuple(gpus),
        tuple(next((line["phases"] for line in reversed(lines) if line["phases"]), ())),
    )


def _share_phases(attempts: Sequence[AttemptUse]) -> dict[str, float]:
    seconds = dict.fromkeys(("lost", *_PHASES), 0.0)
    for one in attempts:
        there = [node for node in one.used if node.phases]
        seconds["lost"] += one.lost_s * one.nodes * bool(there)
        for node in there:
            share = 1 - one.lost_s / one.seconds if one.seconds else 1.0
            before_s = max(one.seconds - sum(node.phases), 0.0)  # the launcher and Python start
            for name, part in zip(_PHASES, (node.phases[0] + before_s, *node.phases[1:]), strict=True):
                seconds[name] += share * part / len(there) * one.nodes
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items() if part}


def _find_speed(
    run: RunFolder, attempts: Sequence[AttemptUse], made: Sequence[Steps]
) -> tuple[float | None, float | None]:
    """Samples per second over the last attempt that has made steps; and the MFU, of the GPUs' dense peak in 16 bits."""
    for one, steps in zip(reversed(attempts), reversed(made), strict=True):
        attempt = run.attempt(one.name)
        batch = None
        with suppress(HpcddpError):
            versions = read_versions(attempt)
            batch = (versions.plan or {}).get("global_batch") if versions is not None else None
        if len(steps) > 2 and batch and steps[-1][1] > steps[1][1]:
            speed = (steps[-1][0] - steps[1][0]) * batch / (steps[-1][1] - steps[1][1])
            types = [find_gpu_type(gpu[0]) for node in one.used for gpu in node.gpus]
            peaks = [gpu.tflops * 1e12 for gpu in types if gpu is not None]
            flops = _read_flops(attempt)
            return speed, speed * flops / sum(peaks) if flops and peaks and len(peaks) == len(types) else None
    return None, None


def _read_flops(attempt: AttemptFolder) -> float:
    """A sample's cost, of all models together; 0: not known."""
    before = takewhile(lambda line: not line.is_progress, MetricsReader(attempt.metrics).read())
    return sum(line.numbers.get("flops_per_sample") or 0.0 for line in before if line.kind == "model")


def _advise(found: Efficiency, run: RunFolder, holds: Sequence[Hold]) -> list[str]:
    """What to type for the next run. Nothing of one that has not ended well."""
    words, ranks = list[str](), 1
    with suppress(HpcddpError):
        ranks = read_plan_file(run).ranks_per_node or 1
    ends = [hold.end for hold in holds]
    if not ends or ends[-1] is None or ends[-1].status != 0:
        return []
    if found.cpus and found.cpu_use is not None and found.cpu_use < _FEW:
        nodes = (node for one in found.attempts for node in one.used if node.seconds)
        used = max((node.cpu_s / node.seconds for node in nodes), default=0)
        fewer = max(math.ceil(used * _MARGIN / ranks), 1)
        words += [f"--set cpus_per_rank={fewer}"] if fewer * ranks < found.cpus else []
    if found.memory and found.memory_limit and found.memory < _FEW * found.memory_limit:
        words.append(f"--set mem_gb={math.ceil(found.memory * _MARGIN / _GB)}")
    walltimes = [one.walltime_s for one in read_submissions(run) if one.walltime_s]
    longest = max((one.seconds for one in found.attempts), default=0.0)
    minutes = math.ceil(longest * _MARGIN / 300) * 5
    if walltimes and longest and minutes * 60 < _FEW * walltimes[-1]:
        words.append(f"--walltime {format_walltime(minutes * 60)}")
    return words


def format_efficiency(found: Efficiency) -> str:
    gpus = cpus = memory = ""
    if found.gpu_use is not None and found.gpu_memory is not None:
        most, there = (round(mib * _MIB / _GB) for mib in found.gpu_memory)
        gpus = f"{_percent(found.gpu_use)} of the time in use, memory at most {most} of {there} GB"
    if found.cpu_use is not None and found.cpus:
        cpus = f"{_percent(found.cpu_use)} of {format_count(found.cpus, 'CPU')} on each node"
    if found.memory is not None:
        memory = f"at most {_format_bytes(found.memory, found.memory_limit)} on a node"
    speed = f"{found.samples_per_s:,.0f} samples/s" if found.samples_per_s else ""
    rows = {
        "paid": _format_hours(found),
        "time": ", ".join(f"{_percent(share)} {name}" for name, share in found.phases.items() if share >= 0.005),
        "GPUs": gpus,
        "CPUs": cpus,
        "memory": memory,
        "speed": speed + (f", MFU {_percent(found.mfu)}" if found.mfu is not None else ""),
        "next time": " ".join(found.advice),
    }
    lines = [f"{found.run}: {format_count(len(found.attempts), 'attempt')}"]
    return "\n".join([*lines, *(f"  {name:<9}  {text}" for name, text in rows.items() if text)]) + "\n"


def format_short(found: Efficiency) -> str:
    """For `hpcddp status`: GPUs 84 %, CPUs 32 %, memory 12 of 64 GB, 1.2 node-hours (0.1 lost)."""
    uses = (("GPUs", found.gpu_use), ("CPUs", found.cpu_use))
    parts = [f"{name} {_percent(use)}" for name, use in uses if use is not None]
    if found.memory is not None:
        parts.append(f"memory {_format_bytes(found.memory, found.memory_limit)}")
    return ", ".join([*parts, _format_hours(found)]) if parts else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _format_hours(found: Efficiency) -> str:
    lost = found.lost_node_hours
    more = f", {lost:.2f} of them lost (done again, or to be done again)" if lost >= 0.005 else ""
    return f"{found.node_hours:.2f} node-hours{more}"


def _format_bytes(used: int, limit: int | None) -> str:
    return f"{used / _GB:.1f}{f' of {limit / _GB:.0f}' if limit else ''} GB"


def efficiency_record(found: Efficiency) -> dict[str, Any]:
    attempts = [one._asdict() | {"used": [node._asdict() for node in one.used]} for one in found.attempts]
    return found._asdict() | {"attempts": attempts}
