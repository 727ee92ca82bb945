"""The checker of a job: it starts processes by the job's launcher, hears what they are, has pairs of hosts exchange
data, and says which hosts have passed.

It listens, and the processes call it, so that one that never comes is known by the list of the job's hosts. Everything
has a time limit; nothing waits for all.
"""

from __future__ import annotations

import _thread
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from statistics import median

from hpcddp.checks.environment import FAILED, NOT_ASKED, OK, WARNING, Check
from hpcddp.checks.node import MARK, CheckedJob, CheckedNode, Gpu, Process, judge_nodes, judge_ranks
from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import same_host
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO, Any

    Pair = tuple[str, str]


# Links: which hosts exchange data with which, in rounds; and which host or link is slow by what they measured.

#: Up to so many hosts every pair is tried; of more each host twice.
ALL_PAIRS = 16
_SLOW = 1 / 2  # of the median
#: Between CPUs a link has to be below both to be slow: above, the CPU's share makes most of the difference, and a cable
#: at fault falls back to a tenth.
_SLOW_CPU, _LEAST_CPU_GBPS = 1 / 5, 1.0
_LATE = 10.0  # times the median, and so many milliseconds


class LinkSpeed(Record):
    """What two hosts have measured, there and back. `error`: why nothing was."""

    gbps: float = 0.0
    ms: float = 0.0
    error: str = ""


def count_rounds(hosts: int) -> int:
    """How many rounds there are."""
    return 0 if hosts < 2 else (hosts - 1 + hosts % 2) if hosts <= ALL_PAIRS else 2


def plan_round(hosts: Sequence[str], number: int, found: Mapping[Pair, LinkSpeed]) -> list[Pair]:
    """The pairs of one round, which exchange side by side. Of few hosts all pairs come, one round after the other. Of
    many the second round pairs a slow host with a fast one, by what the first has found: the slow one is slow again."""
    if len(hosts) <= ALL_PAIRS:
        return _turn([*hosts], number)
    if number == 0:
        return list(zip(hosts[0::2], hosts[1::2], strict=False)) + ([(hosts[-1], hosts[0])] if len(hosts) % 2 else [])
    speed = {host: max((one.gbps for pair, one in found.items() if host in pair), default=0.0) for host in hosts}
    order = sorted(hosts, key=lambda host: (speed[host], hosts.index(host)))
    half = len(order) // 2
    slow, fast = order[:half], order[: half - 1 : -1]
    pairs = list(zip(slow, fast, strict=False))
    known = {frozenset(pair) for pair in found}
    for at, (one, its) in enumerate(pairs):  # nobody meets the same one again
        if {one, its} in known:
            others = [n for n, (a, b) in enumerate(pairs) if not {frozenset((one, b)), frozenset((a, its))} & known]
            if others:
                (a, b), to = pairs[others[0]], others[0]
                pairs[at], pairs[to] = (one, b), (a, its)
    return pairs + ([(order[half], order[-1])] if len(order) % 2 else [])


def _turn(hosts: list[str], number: int) -> list[Pair]:
    """One round of a tournament in which everybody meets everybody: the first stays, the others turn."""
    places = [*hosts, ""] if len(hosts) % 2 else hosts
    others = places[1:]
    turned = [places[0], *others[number % len(others) :], *others[: number % len(others)]] if others else places
    half = len(turned) // 2
    pairs = zip(turned[:half], reversed(turned[half:]), strict=True)
    return [(a, b) for a, b in pairs if a and b]


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
    median_one = find_usual(found)
    usual = median_one.error or f"the median is {median_one.gbps:.3g} Gb/s"
    hosts = {host for pair in found for host in pair}
    ill = set[str]()
    left = {*slow}
    for host in sorted(hosts, key=lambda name: (-sum(name in pair for pair in slow), name)):
        of_host = [pair for pair in found if host in pair]
        others = [pair for pair in found if host not in pair]
        if of_host and left >= {*of_host} and not {*others} <= slow:
            ill.add(host)
            left -= {*of_host}
            worst = min(of_host, key=lambda pair: found[pair].gbps)
            told = f"all {len(of_host)} of its links are slow: {_say(worst, found[worst])}, and {usual}"
            yield host, Check("slow host", told, "leave the node out; tell the site", FAILED)
    for pair in sorted(left):
        yield (
            pair[1],
            Check("slow link", f"{_say(pair, found[pair])}; {usual}", "tell the site, with both names", FAILED),
        )


def _say(pair: Pair, one: LinkSpeed) -> str:
    name = " with ".join(pair)
    return f"{name}: {one.error}" if one.error else f"{name} {one.gbps:.3g} Gb/s, {one.ms:.3g} ms"


# The checker.

LOOK_S, NAME_S, PAIR_S, ALL_S, CLOCK_S = 30.0, 5.0, 8.0, 8.0, 1.0
#: After which no further round begins.
MOST_S = 60.0
_FIRST_S = 3.0  # for the first exchange of a device: NCCL sets up what the next ones have
_TRIES = 3  # of a pair, until it is believed to be slow
_END_S = 5.0
_QUIET_S = 1.0


class CheckRequest(Record):
    """What to check. `hosts`: those that should answer, where they are known. `folders`: where it writes.
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
    """What was found. `hosts`: name -> its state. `checks`: with their host, "" for the launch as a whole. `pairs`:
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
    """A process that has called. `pending`: number of an order -> what hears the answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.process: Process | None = None
        self.pending: dict[int, Callable[[dict[str, Any]], None]] = {}
        self.rest = b""
        self.is_gone = self.is_measured = False


class Checker:
    """Hears the processes of one launch."""

    def __init__(self, request: CheckRequest, env: Mapping[str, str], tell: Callable[[bytes], None]) -> None:
        self._request, self._env, self._tell = request, env, tell
        self._listener = open_listener()
        self._key = secrets.token_hex(8)
        self._callers: list[_Caller] = []
        self._number = 0
        self._began = self._called = time.monotonic()
        self._unreached: list[tuple[Process, str]] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self.nodes: dict[str, CheckedNode] = {}
        self._leaders: dict[str, _Caller] = {}

    # The launch.

    def check(self) -> CheckReport:
        """Start, hear, judge, and end what was started."""
        try:
            self._start()
            self._hear(self._is_complete, self._began + LOOK_S * self._request.patience)
            self._set_clocks()
            self._find_names()
            return self._judge()
        finally:
            self._end()

    def _start(self) -> None:
        addresses = ",".join(list_addresses(self._env, os.uname().nodename))
        port = str(self._listener.getsockname()[1])
        process = [self._request.python, "-m", "hpcddp.checks.process", f"{self._key}:{port}:{addresses}"]
        self._launcher = subprocess.Popen(
            [*self._request.words, *process],
            env=dict(self._env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = self._launcher.stdout
        assert output is not None
        _thread.start_new_thread(self._read_output, (output,))

    def _read_output(self, output: IO[bytes]) -> None:
        """What processes print that do not reach this one; the rest is for people."""
        with output:
            for line in output:
                _, mark, said = line.partition(MARK.encode())
                if not mark:
                    self._tell(line)
                    continue
                with suppress(ValueError, KeyError, TypeError):
                    found = json.loads(said)
                    if found["key"] == self._key:
                        self._unreached.append((Process(**found["process"]), found["error"]))

    def _is_complete(self) -> bool:
        """Whether all that are expected have said what they are."""
        called = [caller for caller in self._callers if caller.process is not None]
        size = max((caller.process.world_size or 0 for caller in called if caller.process), default=0)
        there = {caller.process.host for caller in called if caller.process}
        every_host = all(any(same_host(host, one) for one in there) for host in self._request.hosts)
        # where no process knows how many they are, others may still come
        quiet = time.monotonic() - self._called > _QUIET_S * self._request.patience
        if called and (len(called) + len(self._unreached) >= size if size else every_host and quiet):
            return all(caller.is_measured or caller.is_gone for caller in called)
        return not called and self._launcher is not None and self._launcher.poll() is not None

    # Orders and answers.

    def _hear(self, is_done: Callable[[], bool], end: float) -> None:
        """Hear the processes until it is done, or until this time."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for caller in self._callers:
            if not caller.is_gone:
                poll.register(caller.connection, select.POLLIN)
        while not is_done() and (left := end - time.monotonic()) > 0:
            ready = {number for number, _ in poll.poll(min(left, 0.25) * 1000)}
            if self._listener.fileno() in ready:
                connection, _ = self._listener.accept()
                self._called = time.monotonic()
                self._callers.append(_Caller(connection))
                poll.register(connection, select.POLLIN)
            for caller in self._callers:
                if not caller.is_gone and caller.connection.fileno() in ready and not self._read(caller):
                    poll.unregister(caller.connection)
                    caller.is_gone = True
                    caller.pending.clear()

    def _read(self, caller: _Caller) -> bool:
        """Whether the connection is still there."""
        try:
            data = caller.connection.recv(1 << 20)
        except OSError:
            return False
        *lines, caller.rest = (caller.rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
                if caller.process is None:
                    self._greet(caller, said)
                elif (heard := caller.pending.pop(said.pop("id"), None)) is not None:
                    heard(said)
            except (ValueError, KeyError, TypeError, AttributeError):
                return False  # somebody else's program
        return data != b""

    def _greet(self, caller: _Caller, said: dict[str, Any]) -> None:
        if said["key"] != self._key:
            raise KeyError(said["key"])
        process = caller.process = Process(**said["process"])
        if process.host in self.nodes:
            self._measure(caller)
        elif process.host not in self._leaders:
            self._leaders[process.host] = caller
            order = {"do": "look", "folders": self._request.folders, "line": self._request.line}
            self._order(caller, lambda answer: self._note_node(process.host, answer), order)

    def _note_node(self, host: str, answer: dict[str, Any]) -> None:
        """A node has looked at itself: from now on its processes may use its GPUs."""
        self.nodes[host] = CheckedNode(**{**answer["node"], "gpus": tuple(Gpu(**gpu) for gpu in answer["gpus"])})
        for caller in self._callers:
            if caller.process is not None and caller.process.host == host:
                self._measure(caller)

    def _measure(self, caller: _Caller) -> None:
        assert caller.process is not None
        leads = self._leaders[caller.process.host] is caller
        order = {"do": "measure", "fast": self._request.fast, "patience": self._request.patience, "leads": leads}
        self._order(caller, lambda answer: self._note(caller, answer), order)

    def _note(self, caller: _Caller, answer: dict[str, Any]) -> None:
        """What a process has found out: of its GPUs what it has tried, and those that no other process sees."""
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

    def _order(self, caller: _Caller, heard: Callable[[dict[str, Any]], None], order: Mapping[str, object]) -> None:
        self._number += 1
        caller.pending[self._number] = heard
        try:
            caller.connection.sendall(json.dumps({"id": self._number, **order}).encode() + b"\n")
        except OSError:
            del caller.pending[self._number]

    def ask(self, orders: Mapping[str, Mapping[str, object]], limit_s: float) -> dict[str, dict[str, Any]]:
        """What the nodes answer to these orders, all given at once; one that does not answer in time is left out."""
        answers: dict[str, dict[str, Any]] = {}
        for host, order in orders.items():
            caller = self._leaders[host]
            if not caller.is_gone:
                self._order(caller, lambda answer, host=host: answers.__setitem__(host, answer), order)  # type: ignore[misc]
        wanted = [host for host in orders if not self._leaders[host].is_gone]
        done = lambda: all(host in answers or self._leaders[host].is_gone for host in wanted)  # noqa: E731
        self._hear(done, time.monotonic() + limit_s * self._request.patience)
        return answers

    # Clocks, and rank 0's name.

    def _set_clocks(self) -> None:
        for host in [*self.nodes]:
            before = time.time()
            answer = self.ask({host: {"do": "clock"}}, CLOCK_S).get(host)
            after = time.time()
            if answer is None:
                continue
            ahead, behind = answer["time"] - after, before - answer["time"]
            self.nodes[host] = self.nodes[host]._replace(clock_s=max(ahead, 0.0) or -max(behind, 0.0))

    def _find_names(self) -> None:
        """Every node calls rank 0's host, by the name under which its ranks will look for it."""
        rank_0 = next((c.process.host for c in self._callers if c.process is not None and c.process.rank == 0), None)
        if rank_0 not in self.nodes:
            return
        where = self.ask({rank_0: {"do": "listen", "token": self._key}}, NAME_S).get(rank_0, {"error": "no answer"})
        others = [host for host in self.nodes if host != rank_0]
        found: dict[str, Mapping[str, str]] = {}
        if "error" in where:
            found[rank_0] = {"port in use": where["error"]}
        else:
            call = {**where, "do": "reach", "token": self._key, "limit_s": NAME_S * self._request.patience}
            answers = self.ask(dict.fromkeys(others, call), 2 * NAME_S)
            found = {host: answer["errors"] for host, answer in answers.items() if answer["errors"]}
        if len(found) > 1 and len(found) == len(others) and all("rank 0's port" in errors for errors in found.values()):
            why = next(iter(found.values()))["rank 0's port"]
            found = {rank_0: {"rank 0's port": f"no other node reaches it: {why}"}}
        for host, errors in found.items():
            self.nodes[host] = self.nodes[host]._replace(errors={**self.nodes[host].errors, **errors})

    # Links.

    def _exchange(self, hosts: Sequence[str], on_gpu: bool) -> dict[Pair, LinkSpeed]:
        """What the pairs have measured, round after round; a slow one is tried again."""
        found: dict[Pair, LinkSpeed] = {}
        for number in range(count_rounds(len(hosts))):
            if not self._has_time(PAIR_S):
                break
            found |= self._run_round(plan_round(hosts, number, found), on_gpu)
        for _ in range(_TRIES - 1):
            again = sorted(find_slow(found, on_gpu=on_gpu))
            while again and self._has_time(PAIR_S):
                busy, now = set[str](), list[tuple[str, str]]()
                for pair in [*again]:
                    if busy.isdisjoint(pair):
                        now.append(pair)
                        busy |= {*pair}
                        again.remove(pair)
                for pair, one in self._run_round(now, on_gpu).items():
                    found[pair] = max(one, found[pair], key=lambda each: (not each.error, each.gbps))
        return found

    def _has_time(self, needed_s: float) -> bool:
        """Whether another part may begin that takes so long at most."""
        return time.monotonic() - self._began < (MOST_S - needed_s) * self._request.patience

    def _run_round(self, pairs: Sequence[Pair], on_gpu: bool) -> dict[Pair, LinkSpeed]:
        answers = self._run_groups(pairs, on_gpu, PAIR_S, is_sum=False)
        late = {"error": f"no answer in {PAIR_S * self._request.patience:.0f} s"}
        found = {}
        for pair in pairs:
            said = [answers.get(host, late) for host in pair]
            one = next((one for one in said if "error" in one), said[0])
            found[pair] = LinkSpeed(one.get("gbps", 0.0), one.get("ms", 0.0), one.get("error", ""))
        return found

    def _run_groups(
        self, groups: Sequence[Sequence[str]], on_gpu: bool, limit_s: float, *, is_sum: bool
    ) -> dict[str, dict[str, Any]]:
        """What hosts answer that exchange data within these groups, side by side, one device of each."""
        limit = {"limit_s": limit_s * self._request.patience}
        stores = self.ask({group[0]: {"do": "device", "what": "open_store", **limit} for group in groups}, NAME_S)
        shared = {
            "do": "device",
            "what": "exchange",
            "backend": "nccl" if on_gpu else "gloo",
            "is_sum": is_sum,
            **limit,
        }
        orders: dict[str, Mapping[str, object]] = {}
        for group in groups:
            if "port" in (where := stores.get(group[0], {})):
                one = {**shared, **where, "size": len(group)}
                orders |= {host: {**one, "rank": rank} for rank, host in enumerate(group)}
        failed = {host: said for host, said in stores.items() if "error" in said}
        return failed | self.ask(orders, limit_s + _FIRST_S)

    def _reduce(self, hosts: Sequence[str], on_gpu: bool) -> tuple[float | None, str]:
        """Gb/s of a sum over all hosts, one device of each; and why there is none."""
        answers = self._run_groups([hosts], on_gpu, ALL_S, is_sum=True)
        errors = [(host, answers.get(host, {"error": "no answer"}).get("error")) for host in hosts]
        wrong = [f"{host}: {error}" for host, error in errors if error]
        return (None, wrong[0]) if wrong else (answers[hosts[0]]["all_reduce_gbps"], "")

    # The report.

    def _judge(self) -> CheckReport:
        processes = tuple(caller.process for caller in self._callers if caller.process is not None)
        job = CheckedJob([*self.nodes.values()], processes, self._request.gpus_per_node)
        everybody = (*processes, *(process for process, _ in self._unreached))
        checks = [*self._list_silent(everybody), *judge_ranks(everybody, self._expected(everybody)), *judge_nodes(job)]
        failed = {host for host, check in checks if check.state == FAILED}
        good = [host for host in self.nodes if host not in failed]
        on_gpu = bool(good) and all(self.nodes[host].gpus for host in good)
        pairs: dict[Pair, LinkSpeed] = {}
        rate, means = None, "NCCL" if on_gpu else "gloo"
        if not self._request.fast and len(good) > 1:
            pairs = self._exchange(good, on_gpu)
            checks += judge_links(pairs, on_gpu=on_gpu)
            slow = {host for host, check in checks if check.state == FAILED}
            left = [host for host in good if host not in slow]
            if len(left) > 1 and self._has_time(0):
                rate, why = self._reduce(left, on_gpu)
                if why:
                    checks.append(("", Check("all-reduce", f"no sum over {len(left)} hosts: {why}", "hpcddp diagnose")))
        states = dict.fromkeys(self._expected(everybody), NOT_ASKED) | dict.fromkeys(self.nodes, OK)
        for state in (WARNING, FAILED):
            states.update({host: state for host, check in checks if host and check.state == state})
        seconds = time.monotonic() - self._began
        return CheckReport(states, tuple(checks), len(processes), pairs, means, rate, seconds)

    def _expected(self, everybody: Sequence[Process]) -> list[str]:
        """The hosts that should be there, by the names that they give themselves where they have come."""
        there = [*dict.fromkeys(process.host for process in everybody)]
        own = [next((one for one in there if same_host(host, one)), host) for host in self._request.hosts]
        return [*own, *(host for host in there if host not in own)]

    def _list_silent(self, everybody: Sequence[Process]) -> Iterator[tuple[str, Check]]:
        """Hosts that never came, that do not reach this one, or that have not said what they are in time."""
        for process, why in self._unreached:
            remedy = "open the ports between the job's nodes; a site's recipe for its network: rendezvous"
            yield process.host, Check("checker's port", why, remedy, FAILED)
        there = {process.host for process in everybody}
        limit_s = LOOK_S * self._request.patience
        late = f"did not answer in {limit_s:.0f} s"
        if not there and self._launcher is not None and (status := self._launcher.poll()) is not None:
            what = self._request.words[0] if self._request.words else self._request.python
            told = f"{what} ended with status {status}, and no process called"
            yield "", Check("launcher", told, "what it has printed says why", FAILED)
            return
        if everybody and len(everybody) >= max(process.world_size or 0 for process in everybody) > 0:
            late = "no process of the launch is there"
        for host in self._expected(everybody):
            if host in self.nodes or host in {process.host for process, _ in self._unreached}:
                continue
            told = late if host not in there else f"it came, and did not say what it is in {limit_s:.0f} s"
            yield host, Check("answer", told, "leave the node out; tell the site", FAILED)

    def _end(self) -> None:
        for caller in self._callers:
            caller.connection.close()
        self._listener.close()
        launcher = self._launcher
        for number in (0, signal.SIGTERM, signal.SIGKILL) if launcher is not None else ():
            assert launcher is not None
            with suppress(OSError):
                launcher.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_S)
                return


# What people and programs are shown.


def format_report(report: CheckReport) -> str:
    """For people: what is wrong first, then the numbers, the sum last."""
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
    """For programs."""
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
