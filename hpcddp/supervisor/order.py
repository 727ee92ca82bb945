"""Options of `hpcddp supervise` in a job script, and the launcher's line behind `--`.

They alone say what the job does, also how many nodes and ranks there are and which command they run: a person who
changes these words changes the job and its records.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from contextlib import suppress

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.launchers import LAUNCHERS, NAME_VALUE_OPTIONS, NODE_AGENTS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.command import check_run_name, name_command
from hpcddp.runs.folder import RUNS
from hpcddp.runs.state import PlanFile
from hpcddp.schedulers.registry import find_current_job, find_scheduler, list_hosts
from hpcddp.supervisor.notice import read_notify
from hpcddp.sweep import check_axes, count_points, fill_point, find_point, format_point, read_axes
from hpcddp.units import parse_count, parse_walltime, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from hpcddp.ranks.launcher import Launcher
    from hpcddp.supervisor.notice import Notify

_TEXTS = ("name", "run_dir", "scheduler", "launcher", "site", "resume", "scratch", "preflight", "fresh")
_COUNTS = ("chain", "max_restarts")
_TIMES = ("walltime", "signal", "stall_limit")
#: Between the command that copies data to the nodes and the launcher's.
THEN = "--then"
#: Options of `hpcddp exec` that describe the job.
_OF_EXEC = {"--gpus-per-node": "gpus_per_node", "--global-batch": "global_batch"}
#: The number of an option's value; of Open MPI's mapping that of each node.
_NUMBER = re.compile(r"(?:ppr:(?=\d+:node))?(\d+)", re.ASCII)


class Order(Record):
    """The options of `hpcddp supervise`, as its `--help` says them, and the launcher's line.

    `name`: the run's, below `runs/`; else `run_dir` is its folder. `sweep`: the axes, name -> values, where the job is
    a point of one; `point`: its values. `preflight`: a line of shell that each node has to run; "": no check of it.
    """

    scheduler: str
    launcher: str
    line: LaunchLine
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
    preflight: str = ""
    notify: Notify | None = None
    sweep: Mapping[str, Sequence[str]] = {}
    point: Mapping[str, str] = {}


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
        check_run_name(re.sub(r"\.[0-9]+$", "", order.name), "--name", "--name {}")
    if count_points(order.sweep) > 1:
        check_axes(order.sweep, order.line.command, ())
    return order


def find_run_folder(order: Order, env: Mapping[str, str]) -> str:
    """The run's folder, without the index of an array. The job's own spelling of its working directory is taken, which
    other hosts may know alone."""
    here, spelled = os.getcwd(), env.get("PWD", "")
    with suppress(OSError):
        here = spelled if os.path.isabs(spelled) and os.path.samefile(spelled, here) else here
    return os.path.join(here, os.path.join(RUNS, order.name) if order.name else order.run_dir)


def describe_job(order: Order) -> PlanFile:
    line = order.line
    return PlanFile(
        site=order.site,
        scheduler=order.scheduler,
        launcher=line.node_agent or order.launcher,
        nodes=line.nodes,
        ranks_per_node=line.ranks_per_node,
        world_size=line.world_size,
        gpus_per_node=line.gpus_per_node,
        global_batch=line.global_batch,
        command=list(line.command),
        point=dict(order.point) or None,
    )


def take_index(order: Order, env: Mapping[str, str], emit: Callable[[str], None]) -> Order:
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
    emit(f"point {index} of {points}: {format_point(point)}" if points > 1 else f"sweep: {format_point(point)}")
    return order._replace(point=point, line=order.line.fill(point))


def _count_hosts(scheduler: str, env: Mapping[str, str]) -> int:
    return 0 if find_scheduler(scheduler).this_machine else len(list_hosts(env))


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


class LaunchLine(Record):
    """The launcher's line. `words`: all of it but for `stage`, which copies data to the nodes before. `command`: what
    each rank runs. `node_agent`: the row of what makes the ranks of a node, "" if the launcher does. What the line does
    not say is None, and 0 GPUs."""

    words: tuple[str, ...]
    command: tuple[str, ...]
    nodes: int
    stage: tuple[str, ...] = ()
    node_agent: str = ""
    ranks_per_node: int | None = None
    world_size: int | None = None
    gpus_per_node: int = 0
    global_batch: int | None = None

    def fill(self, point: Mapping[str, str]) -> LaunchLine:
        """The same with the values of a point of a sweep in its command."""
        cut, node_agent = len(self.words) - len(self.command), LAUNCHERS.get(self.node_agent)
        handed = {name: node_agent.as_arguments([value])[0] if node_agent else value for name, value in point.items()}
        words = (*self.words[:cut], *fill_point(self.words[cut:], handed))
        return self._replace(words=words, command=tuple(fill_point(self.command, point)))


def read_line(words: Sequence[str], launcher: str, count_hosts: Callable[[], int]) -> LaunchLine:
    """Parse a launcher's line. RequestError without a command for the ranks behind `hpcddp exec --`."""
    at = _find_exec(words)
    cut = words.index("--", at) if at and "--" in words[at:] else len(words)
    if not words[cut + 1 :]:
        what = f"the launcher's line has no command behind `hpcddp exec --`: {shorten(shlex.join(words))}"
        raise RequestError(what, 'put it there: "$HPCDDP_PYTHON" -m hpcddp exec -- python train.py')
    begin = words[:at].index(THEN) + 1 if THEN in words[:at] else 0
    head, of_exec, command = words[begin:at], words[at + 1 : cut], words[cut + 1 :]
    text = f" {' '.join(head)} "
    node_agent = next((name for name in NODE_AGENTS if any(f" {one} " in text for one in LAUNCHERS[name].commands)), "")
    numbers = read_numbers(split_launch(head)[0], LAUNCHERS[launcher].counts)
    made = read_numbers(of_exec, {"--nodes": "nodes", "--ranks-per-node": "per_node"})
    if node_agent:
        made = read_numbers(head, LAUNCHERS[node_agent].counts)
        command = [word.replace("$$", "$") for word in command] if LAUNCHERS[node_agent].fills_arguments else command
    processes, per_node = numbers.get("processes"), numbers.get("per_node")
    nodes = made.get("nodes") or numbers.get("nodes") or (-(-processes // per_node) if processes and per_node else 0)
    nodes = nodes or max(count_hosts(), 1)
    each = made.get("per_node") or per_node or (processes // nodes if processes else None)
    whole = nodes * each if each else None
    return LaunchLine(
        words=tuple(words[begin:]),
        command=tuple(command),
        nodes=nodes,
        stage=tuple(words[: begin - 1]) if begin else (),
        node_agent=node_agent,
        ranks_per_node=each,
        world_size=whole if "per_node" in made else processes or whole,
        **read_numbers(of_exec, _OF_EXEC),
    )


def split_check(words: Sequence[str], python: str) -> tuple[list[str], str]:
    """Split off what starts the processes of a launcher's line, up to `hpcddp exec` or a node agent, and the Python
    that runs them: `python` where the line does not say."""
    words = words[words.index(THEN) + 1 :] if THEN in words else words
    at = _find_exec(words)
    if at < 2:
        return [*words], python
    is_module = words[at - 2] == "-m"
    cut, python = (at - 3, words[at - 3]) if is_module else (at - 1, python)
    commands = [command for name in NODE_AGENTS for command in LAUNCHERS[name].commands]
    for i in range(cut):
        if words[i].rpartition("/")[2] in commands:
            return [*words[:i]], python
        if " ".join(words[i : i + 2]) in commands:
            return [*words[: i - 1]], python
    return [*words[:cut]], python


def _find_exec(words: Sequence[str]) -> int:
    """Where `exec` of the first `hpcddp exec` is; 0: there is none."""
    pairs = enumerate(itertools.pairwise(words), 1)
    return next((at for at, (program, verb) in pairs if verb == "exec" and os.path.basename(program) == "hpcddp"), 0)


def split_launch(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A launcher's program with its options, and what it starts. Of an option without a value, what it starts begins
    one word late."""
    at = 1
    if os.path.basename(words[0] if words else "") == "env":
        at += 1 + next((i for i, word in enumerate(words[1:]) if "=" not in word), 0)
    while at < len(words) and words[at].startswith("-"):
        has_value = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("-")
        at += 3 if words[at].lstrip("-") in NAME_VALUE_OPTIONS else 2 if has_value else 1
    return list(words[:at]), list(words[at:])


def read_numbers(words: Sequence[str], counts: Mapping[str, str]) -> dict[str, int]:
    """Read the numbers of these options, the first one of each kind: `counts` has the meaning of each."""
    found = [(counts[option], number) for _, option, _, number in _find_options(words, counts) if number]
    return {meaning: int(number[1]) for meaning, number in reversed(found)}


def name_hosts(
    words: Sequence[str], row: Launcher, line: LaunchLine, hosts: Sequence[str], path: str
) -> tuple[list[str], str]:
    """These words of a launcher for other hosts, with as many processes on each; and the text of the file `path` that
    lists them."""
    launch, rest = split_launch(words)
    numbers = read_numbers(launch, row.counts)
    each = numbers.get("per_node") or -(-numbers.get("processes", 0) // line.nodes)
    _set_numbers(launch, row.counts, {"nodes": len(hosts), "processes": each * len(hosts)})
    form, option, *others = row.hosts
    for at, _, begin, _ in reversed([*_find_options(launch, (option, *others))]):  # what names hosts already
        del launch[at - (begin == 0) : at + 1]
    last = max((at for at, *_ in _find_options(launch, row.counts)), default=0)
    launch[last + 1 : last + 1] = [f"{option}{path}"] if option.endswith("=") else [option, path]
    end = rest.index("--") if "--" in rest else 0
    options = rest[:end]
    counts = LAUNCHERS[line.node_agent].counts if line.node_agent else {}
    _set_numbers(options, {**counts, "--nodes": "nodes"}, {"nodes": len(hosts)})
    return [*launch, *options, *rest[end:]], "".join(form.format(host=host, each=each) + "\n" for host in hosts)


def _find_options(words: Sequence[str], options: Iterable[str]) -> Iterator[tuple[int, str, int, re.Match[str] | None]]:
    """The values of these options: the word's index, the option, where in the word the value begins, and its number."""
    known = {option.removesuffix("="): option for option in options}
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        glued = word[:2] in known and word[1:2] != "-" and word[2:].isdigit()  # -n8
        if equals and name in known:
            yield at, known[name], len(name) + 1, _NUMBER.match(word, len(name) + 1)
        elif glued:
            yield at, known[word[:2]], 2, _NUMBER.match(word, 2)
        elif word in known and at + 1 < len(words):
            yield at + 1, known[word], 0, _NUMBER.match(words[at + 1])


def _set_numbers(words: list[str], counts: Mapping[str, str], now: Mapping[str, int]) -> None:
    for at, option, _, number in [*_find_options(words, counts)]:
        if number and counts[option] in now:
            words[at] = f"{words[at][: number.start(1)]}{now[counts[option]]}{words[at][number.end(1) :]}"
