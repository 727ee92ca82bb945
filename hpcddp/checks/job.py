"""The checker of a job: it starts processes by the job's launcher, hears what they are, has pairs of hosts exchange
data, and says which hosts have passed.

It listens, and the processes call it, so that one that never comes is known by the list of the job's hosts. Everything
has a time limit; nothing waits for all.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import combinations
from statistics import median

from hpcddp.checks.environment import FAILED, NOT_CHECKED, OK, WARNING, Check
from hpcddp.checks.node import CheckedJob, CheckedNode, Gpu, Process, judge_nodes, judge_ranks
from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import same_host
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Pair = tuple[str, str]
    Answer = dict[str, Any]


# Links: which hosts exchange data with which, in rounds; and which host or link is slow by what they measured.

#: Up to so many hosts every pair is tried; of more each host twice.
ALL_PAIRS = 16
_SLOW = 1 / 2  # of the median
#: Between CPUs a link has to be below both to be slow: above, the CPU's share makes most of the difference, and a cable
#: at fault falls back to a tenth.
_SLOW_CPU, _LEAST_CPU_GBPS = 1 / 5, 1.0
_LATE = 10.0  # times the median, and so many milliseconds
_TRIES = 3  # of a pair, until it is believed to be slow


class LinkSpeed(Record):
    """Speed of the link between two hosts, there and back. `error`: why there is none."""

    gbps: float = 0.0
    ms: float = 0.0
    error: str = ""


def plan_pairs(hosts: Sequence[str], found: Mapping[Pair, LinkSpeed], *, on_gpu: bool) -> Iterator[list[Pair]]:
    """The pairs that exchange data, one list after the other, each by what has been `found` until then. Of few hosts
    all; of many each host with the next one, and then one of the slower half with one of the faster: a slow host is
    slow again, and the one that was slow by it is not. At last those that are slow, since something else may have been.
    """
    if len(hosts) <= ALL_PAIRS:
        yield [*combinations(hosts, 2)]
    else:
        yield list(zip(hosts[::2], hosts[1::2], strict=False))  # of an odd number the last one waits
        speed = {host: max((one.gbps for pair, one in found.items() if host in pair), default=-1.0) for host in hosts}
        order = sorted(hosts, key=lambda host: speed[host])
        half, is_odd = divmod(len(order), 2)
        yield list(zip(order[:half], order[half:], strict=False)) + [(order[0], order[-1])] * is_odd
    for _ in range(_TRIES - 1):
        yield sorted(find_slow(found, on_gpu=on_gpu))


def split_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs in rounds, which exchange side by side: no host is in two pairs of one."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (one for one in rounds if not any({*pair} & {*other} for other in one))
        if (found := next(free, None)) is not None:
            found.append(pair)
        else:
            rounds.append([pair])
    return rounds


def find_usual(found: Mapping[Pair, LinkSpeed]) -> LinkSpeed:
    """The median of the hosts, each by the best of its links: a slow host makes all links of a small job's others slow,
    and none of their best."""
    hosts = {host for pair in found for host in pair}
    of_hosts = [[one for pair, one in found.items() if host in pair and not one.error] for host in hosts]
    known = [links for links in of_hosts if links]
    if not known:
        return LinkSpeed(error="no pair has exchanged anything")
    best = [(max(one.gbps for one in links), min(one.ms for one in links)) for links in known]
    return LinkSpeed(median(rate for rate, _ in best), median(ms for _, ms in best))


def find_slow(found: Mapping[Pair, LinkSpeed], *, on_gpu: bool) -> set[Pair]:
    """The pairs that have exchanged nothing, or far more slowly than the median."""
    usual = find_usual(found)
    least = usual.gbps * _SLOW if on_gpu else min(usual.gbps * _SLOW_CPU, _LEAST_CPU_GBPS)
    late = max(usual.ms * _LATE, _LATE)
    return {pair for pair, one in found.items() if one.error or one.gbps < least or one.ms > late}


def judge_links(found: Mapping[Pair, LinkSpeed], *, on_gpu: bool) -> Iterator[tuple[str, Check]]:
    """The slow hosts, and the slow links between hosts that are not slow themselves, each with what was measured. A
    host is slow if each of its links is, and the others are not slow without it; one of two hosts cannot be named."""
    slow = find_slow(found, on_gpu=on_gpu)
    left, middle = {*slow}, find_usual(found)
    usual = middle.error or f"the median is {middle.gbps:.3g} Gb/s"
    hosts = {host for pair in found for host in pair}
    for host in sorted(hosts, key=lambda name: (-sum(name in pair for pair in slow), name)):
        of_host = {pair for pair in found if host in pair}
        if of_host <= left and not found.keys() - of_host <= slow:
            left -= of_host
            worst = min(of_host, key=lambda pair: found[pair].gbps)
            told = f"all {len(of_host)} of its links are slow: {_say(worst, found[worst])}, and {usual}"
            yield host, Check("slow host", told, "leave the node out; tell the site", FAILED)
    for pair in sorted(left):
        told = f"{_say(pair, found[pair])}; {usual}"
        yield pair[1], Check("slow link", told, "tell the site, with both names", FAILED)


def _say(pair: Pair, one: LinkSpeed) -> str:
    name = " with ".join(pair)
    return f"{name}: {one.error}" if one.error else f"{name} {one.gbps:.3g} Gb/s, {one.ms:.3g} ms"


# The checker.

LOOK_S, NAME_S, PAIR_S, ALL_S, CLOCK_S = 30.0, 5.0, 8.0, 8.0, 1.0
#: After which no further round begins.
MOST_S = 60.0
_FIRST_S = 3.0  # for the first exchange of a device: NCCL sets up what the next ones have
_END_S = 5.0
_QUIET_S = 1.0
_PAUSE_S = 0.05
_MOST_BYTES = 1 << 24  # of an answer: an environment is in it


#: What reading from a process ends in that is gone, or that is another program's.
_BROKEN = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError)


class CheckRequest(Record):
    """A request to check. `hosts`: those that should answer, where they are known. `folders`: where it writes.
    `line`: the job file's own check. `fast`: without torch and links. `patience`: by how much all limits are longer.
    `variables`: those that the launcher needs."""

    words: tuple[str, ...]
    python: str = sys.executable
    hosts: tuple[str, ...] = ()
    gpus_per_node: int = 0
    folders: tuple[str, ...] = ()
    line: str = ""
    fast: bool = False
    patience: float = 1.0
    variables: Mapping[str, str] = {}  # never written to


class CheckReport(Record):
    """The result. `hosts`: name -> its state. `checks`: with their host, "" for the launch as a whole. `pairs`:
    what was exchanged, and by what means. `all_reduce_gbps`: None: it was not tried."""

    hosts: Mapping[str, str]
    checks: tuple[tuple[str, Check], ...]
    ranks: int = 0
    pairs: Mapping[Pair, LinkSpeed] = {}  # never written to
    means: str = ""
    all_reduce_gbps: float | None = None
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether nothing has failed."""
        return all(check.state != FAILED for _, check in self.checks)


class _Caller:
    """A process that has called."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.is_gone = self.is_measured = False
        self._reader, self._writer = reader, writer
        self._number = 0
        self._lock = asyncio.Lock()

    async def ask(self, order: Mapping[str, object], limit_s: float) -> Answer | None:
        """Send an order and return the answer; None: there is none in this time, or the process has gone."""
        async with self._lock:
            self._number += 1
            self._writer.write(json.dumps({"id": self._number, **order}).encode() + b"\n")
            try:
                return await asyncio.wait_for(self._read(self._number), limit_s)
            except asyncio.TimeoutError:
                return None
            except _BROKEN:
                self.is_gone = True
                return None

    async def _read(self, number: int) -> Answer:
        while True:
            answer: Answer = json.loads(await self._reader.readuntil())
            if answer.pop("id") == number:  # else it is late, and nobody waits for it any more
                return answer


class Checker:
    """Hears the processes of one launch, whose output goes to stderr."""

    def __init__(self, request: CheckRequest, env: Mapping[str, str]) -> None:
        self._request, self._env = request, env
        self._key = secrets.token_hex(8)
        self._callers: list[_Caller] = []
        self._leaders: dict[str, _Caller] = {}  # the process of each node that looks at it
        self._looked: dict[str, asyncio.Event] = {}  # whether it has
        self._began = self._called = time.monotonic()
        self._launcher: subprocess.Popen[bytes] | None = None
        self.nodes: dict[str, CheckedNode] = {}

    # The launch.

    def check(self) -> CheckReport:
        """Start, hear, judge, and end what was started."""
        marks = [*self._mark_folders()]
        try:
            return asyncio.run(self._check(marks))
        finally:
            for mark in marks:
                with suppress(OSError):
                    os.unlink(mark)
            self._end_launcher()

    async def _check(self, marks: Sequence[str]) -> CheckReport:
        listener = open_listener()
        look = {"do": "look", "folders": self._request.folders, "marks": marks, "line": self._request.line}

        connections = list[tuple[asyncio.StreamWriter, asyncio.Task[None]]]()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append((writer, asyncio.create_task(self._serve(look, reader, writer))))

        server = await asyncio.start_server(begin, sock=listener, limit=_MOST_BYTES)
        try:
            self._start_launcher(listener.getsockname()[1])
            while not self._is_complete() and self._left_s() > 0:
                await asyncio.sleep(_PAUSE_S)
            await asyncio.gather(*map(self._set_clock, self.nodes))
            await self._find_names()
            return await self._judge()
        finally:
            server.close()
            for writer, task in connections:
                task.cancel()
                writer.close()

    def _mark_folders(self) -> Iterator[str]:
        """A file in each folder that can be written here, which every node has to see."""
        for folder in self._request.folders:
            path = os.path.join(folder, f".hpcddp-check-{self._key}")
            with suppress(OSError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
                yield path

    def _start_launcher(self, port: int) -> None:
        addresses = ",".join(list_addresses(self._env, os.uname().nodename))
        process = [self._request.python, "-m", "hpcddp.checks.process", f"{self._key}:{port}:{addresses}"]
        words = [*self._request.words, *process]
        self._launcher = subprocess.Popen(words, env=dict(self._env), stdin=subprocess.DEVNULL, stdout=2)

    def _end_launcher(self) -> None:
        """End the launcher: without a signal at first, since its processes' connections are closed."""
        launcher = self._launcher
        for number in (0, signal.SIGTERM, signal.SIGKILL) if launcher is not None else ():
            assert launcher is not None
            launcher.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_S)
                return

    def _left_s(self) -> float:
        """Seconds that are left for the processes to say what they are."""
        return self._began + LOOK_S * self._request.patience - time.monotonic()

    def _is_complete(self) -> bool:
        """Whether all that are expected have said what they are."""
        there = {caller.process.host for caller in self._callers}
        if not there:
            return self._launcher is not None and self._launcher.poll() is not None
        size = max(caller.process.world_size or 0 for caller in self._callers)
        every_host = all(any(same_host(host, one) for one in there) for host in self._request.hosts)
        # where no process knows how many they are, others may still come
        quiet = time.monotonic() - self._called > _QUIET_S * self._request.patience
        all_came = len(self._callers) >= size if size else every_host and quiet
        return all_came and all(caller.is_measured or caller.is_gone for caller in self._callers)

    # What the processes say.

    async def _serve(
        self, look: Mapping[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one process until it has said what it is. Other programs are refused."""
        with suppress(*_BROKEN):
            hello = json.loads(await reader.readuntil())
            if hello["key"] != self._key:
                return
            caller = _Caller(Process(**hello["process"]), reader, writer)
            self._callers.append(caller)
            self._called = time.monotonic()
            host = caller.process.host
            leads = self._leaders.setdefault(host, caller) is caller
            looked = self._looked.setdefault(host, asyncio.Event())
            if leads and (answer := await caller.ask(look, self._left_s())) is not None:
                gpus = tuple(Gpu(**gpu) for gpu in answer["gpus"])
                self.nodes[host] = CheckedNode(**{**answer["node"], "gpus": gpus})
                looked.set()
            await looked.wait()  # from now on its processes may use its GPUs
            measure = {"do": "measure", "fast": self._request.fast, "patience": self._request.patience, "leads": leads}
            if (answer := await caller.ask(measure, self._left_s())) is not None:
                self._note(caller, answer)

    def _note(self, caller: _Caller, answer: Answer) -> None:
        """Record a process's findings: of its GPUs what it has tried, and those that no other process sees."""
        process = caller.process = Process(**answer["process"])
        caller.is_measured = True
        node = self.nodes[process.host]
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        for gpu in (Gpu(**said) for said in answer["gpus"]):
            before = gpus.get(gpu.uuid, gpu)
            if gpu.uuid in process.gpus:
                before = before._replace(tflops=gpu.tflops, copy_gbs=gpu.copy_gbs, error=gpu.error)
            gpus[gpu.uuid] = before
        node = node._replace(gpus=tuple(gpus.values()), versions=answer.get("versions", node.versions))
        self.nodes[process.host] = node._replace(errors={**node.errors, **answer.get("errors", {})})

    async def _ask(self, orders: Mapping[str, Mapping[str, object]], limit_s: float) -> dict[str, Answer]:
        """Send these orders, all at once, and return the nodes' answers; one that is late is left out."""
        limit_s *= self._request.patience
        answers = await asyncio.gather(*(self._leaders[host].ask(order, limit_s) for host, order in orders.items()))
        return {host: answer for host, answer in zip(orders, answers, strict=True) if answer is not None}

    # Clocks, and rank 0's name.

    async def _set_clock(self, host: str) -> None:
        before = time.time()
        answer = (await self._ask({host: {"do": "clock"}}, CLOCK_S)).get(host)
        if answer is not None:
            ahead, behind = answer["time"] - time.time(), before - answer["time"]
            self.nodes[host] = self.nodes[host]._replace(clock_s=max(ahead, 0.0) or -max(behind, 0.0))

    async def _find_names(self) -> None:
        """Every node calls rank 0's host, by the name under which its ranks will look for it."""
        rank_0 = next((caller.process.host for caller in self._callers if caller.process.rank == 0), None)
        if rank_0 not in self.nodes:
            return
        listen = {"do": "listen", "token": self._key}
        where = (await self._ask({rank_0: listen}, NAME_S)).get(rank_0, {"error": "no answer"})
        others = [host for host in self.nodes if host != rank_0]
        found: dict[str, Mapping[str, str]] = {}
        if "error" in where:
            found[rank_0] = {"port in use": where["error"]}
        else:
            call = {**where, "do": "reach", "token": self._key, "limit_s": NAME_S * self._request.patience}
            answers = await self._ask(dict.fromkeys(others, call), 2 * NAME_S)
            found = {host: answer["errors"] for host, answer in answers.items() if answer["errors"]}
        if len(found) > 1 and len(found) == len(others) and all("rank 0's port" in errors for errors in found.values()):
            why = next(iter(found.values()))["rank 0's port"]
            found = {rank_0: {"rank 0's port": f"no other node reaches it: {why}"}}
        for host, errors in found.items():
            self.nodes[host] = self.nodes[host]._replace(errors={**self.nodes[host].errors, **errors})

    # Links.

    async def _exchange(self, hosts: Sequence[str], on_gpu: bool) -> dict[Pair, LinkSpeed]:
        """The best that each pair has measured."""
        found: dict[Pair, LinkSpeed] = {}
        rounds = (each for pairs in plan_pairs(hosts, found, on_gpu=on_gpu) for each in split_rounds(pairs))
        for each in rounds:
            if not self._has_time(PAIR_S):
                break
            said = await self._run_groups(each, on_gpu, PAIR_S, is_sum=False)
            for pair, answer in zip(each, said, strict=True):
                one = LinkSpeed(answer.get("gbps", 0.0), answer.get("ms", 0.0), answer.get("error", ""))
                found[pair] = max(one, found.get(pair, one), key=lambda speed: (not speed.error, speed.gbps))
        return found

    def _has_time(self, needed_s: float) -> bool:
        """Whether another part may begin that takes so long at most."""
        return time.monotonic() - self._began < (MOST_S - needed_s) * self._request.patience

    async def _run_groups(
        self, groups: Sequence[Sequence[str]], on_gpu: bool, limit_s: float, *, is_sum: bool
    ) -> list[Answer]:
        """Run the groups' exchanges side by side, by one device of each host: the answers of each group's first host;
        where one has failed, its `error`, and which `host`."""
        limit = {"limit_s": limit_s * self._request.patience}
        opening = {"do": "device", "what": "open_store", **limit}
        answers = await self._ask({group[0]: opening for group in groups}, NAME_S)
        shared = {"do": "device", "what": "exchange", "backend": "nccl" if on_gpu else "gloo", "is_sum": is_sum}
        orders: dict[str, Mapping[str, object]] = {}
        for group in groups:
            if "port" in (where := answers.pop(group[0], {})):
                one = {**shared, **limit, **where, "size": len(group)}
                orders |= {host: {**one, "rank": rank} for rank, host in enumerate(group)}
            elif where:
                answers[group[0]] = where
        answers |= await self._ask(orders, limit_s + _FIRST_S)
        late = {"error": f"no answer in {limit_s * self._request.patience:.0f} s"}
        found: list[Answer] = []
        for group in groups:
            said = {host: answers.get(host, late) for host in group}
            wrong = [host for host in group if "error" in said[host]]
            found.append({"host": wrong[0], **said[wrong[0]]} if wrong else said[group[0]])
        return found

    # The report.

    async def _judge(self) -> CheckReport:
        processes = tuple(caller.process for caller in self._callers)
        hosts = self._list_hosts()
        job = CheckedJob([*self.nodes.values()], processes, self._request.gpus_per_node)
        checks = [*self._list_silent(hosts), *judge_ranks(processes, hosts), *judge_nodes(job)]
        good = _list_good((host for host in hosts if host in self.nodes), checks)  # in the order of the allocation
        on_gpu = bool(good) and all(self.nodes[host].gpus for host in good)
        pairs: dict[Pair, LinkSpeed] = {}
        rate = None
        if not self._request.fast and len(good) > 1:
            pairs = await self._exchange(good, on_gpu)
            checks += judge_links(pairs, on_gpu=on_gpu)
            left = _list_good(good, checks)
            if len(left) > 1 and self._has_time(0):
                (said,) = await self._run_groups([left], on_gpu, ALL_S, is_sum=True)
                rate = said.get("all_reduce_gbps")
                if "error" in said:
                    told = f"no sum over {len(left)} hosts: {said['host']}: {said['error']}"
                    checks.append(("", Check("all-reduce", told, "hpcddp diagnose")))
        states = dict.fromkeys(hosts, NOT_CHECKED) | dict.fromkeys(self.nodes, OK)
        for state in (WARNING, FAILED):
            states |= {host: state for host, check in checks if host and check.state == state}
        means, seconds = "NCCL" if on_gpu else "gloo", time.monotonic() - self._began
        return CheckReport(states, tuple(checks), len(processes), pairs, means, rate, seconds)

    def _list_hosts(self) -> list[str]:
        """The hosts that should be there, by the names that they give themselves where they have come."""
        there = [*self._leaders]
        own = [next((one for one in there if same_host(host, one)), host) for host in self._request.hosts]
        return [*own, *(host for host in there if host not in own)]

    def _list_silent(self, hosts: Sequence[str]) -> Iterator[tuple[str, Check]]:
        """Hosts that never came, or that have not said what they are in time."""
        limit_s = LOOK_S * self._request.patience
        late = f"did not answer in {limit_s:.0f} s"
        if not self._callers and self._launcher is not None and (status := self._launcher.poll()) is not None:
            what = self._request.words[0] if self._request.words else self._request.python
            told = f"{what} ended with status {status}, and no process called"
            yield "", Check("launcher", told, "what it has printed says why", FAILED)
            return
        if len(self._callers) >= max((caller.process.world_size or 0 for caller in self._callers), default=0) > 0:
            late = "no process of the launch is there"
        for host in hosts:
            if host not in self._leaders:
                yield host, Check("answer", late, "leave the node out; tell the site", FAILED)
            elif not self._leaders[host].is_measured:
                told = f"it came, and did not say what it is in {limit_s:.0f} s"
                yield host, Check("answer", told, "leave the node out; tell the site", FAILED)


def _list_good(hosts: Iterable[str], checks: Iterable[tuple[str, Check]]) -> list[str]:
    failed = {host for host, check in checks if check.state == FAILED}
    return [host for host in hosts if host not in failed]


# What people and programs are shown.


def format_report(report: CheckReport) -> str:
    """Format a report for people: faults first, then the numbers, the sum last."""
    lines = []
    for host, check in report.checks:
        where = f"{host}: " if host else ""
        lines += [f"{check.state:8} {where}{check.name}: {check.message}", f"{'':9}hint: {check.remedy}"]
    good = sorted(one.gbps for one in report.pairs.values() if not one.error)
    if good:
        times = sorted(one.ms for one in report.pairs.values() if not one.error)
        middle = len(good) // 2
        span = f"{good[0]:.3g} to {good[-1]:.3g} Gb/s, median " if len(good) > 1 else ""
        told = f"{report.means}, {format_count(len(good), 'pair')}: {span}{good[middle]:.3g} Gb/s"
        lines.append(f"{'links':8} {told} and {times[middle]:.3g} ms")
    if report.all_reduce_gbps is not None:
        lines.append(f"{'links':8} all-reduce over the hosts: {report.all_reduce_gbps:.3g} Gb/s")
    failed = [host for host, state in report.hosts.items() if state == FAILED]
    count = f"{format_count(len(report.hosts), 'host')}, {format_count(report.ranks, 'process')}"
    sum_up = f"failed: {', '.join(failed)}" if failed else "passed" if report.is_well else "failed"
    return "".join(f"{line}\n" for line in [*lines, f"{count} in {report.seconds:.1f} s: {sum_up}"])


def report_record(report: CheckReport) -> dict[str, Any]:
    """The report for programs."""
    return {
        "ok": report.is_well,
        "hosts": dict(report.hosts),
        "checks": [{"host": host, **check._asdict()} for host, check in report.checks],
        "ranks": report.ranks,
        "links": [{"hosts": [*pair], **one._asdict()} for pair, one in report.pairs.items()],
        "means": report.means,
        "all_reduce_gbps": report.all_reduce_gbps,
        "seconds": round(report.seconds, 2),
    }
