"""The checker of a job: it starts processes by the job's launcher, receives what they find, has pairs of hosts exchange
data, and reports which hosts have passed.

It listens, and the processes call it, so that one that never comes is known by the list of the job's hosts. Everything
has a time limit; nothing waits for all.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import combinations
from statistics import median

from hpcddp.checks.environment import FAILED, NOT_CHECKED, OK, WARNING, Check
from hpcddp.checks.node import CheckedJob, CheckedNode, Gpu, Process, judge_nodes, judge_ranks
from hpcddp.checks.process import Peer
from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import same_host
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Pair = tuple[str, str]
    Answer = dict[str, Any]


#: Up to so many hosts every pair is tried; of more each host twice.
ALL_PAIRS = 16
_SLOW = 1 / 2  # of the median
#: Between CPUs a link has to be below both to be slow: above, the CPU's share makes most of the difference, and a cable
#: at fault falls back to a tenth.
_SLOW_CPU, _LEAST_CPU_GBPS = 1 / 5, 1.0
_LATE = 10.0  # times the median, and so many milliseconds
_TRIES = 3  # of a pair, until it is believed to be slow
LOOK_S, NAME_S, PAIR_S, ALL_S = 30.0, 5.0, 8.0, 8.0
#: After which no further round begins.
MOST_S = 60.0
_FIRST_S = 3.0  # for the first exchange of a device: NCCL sets up what the next ones have
_END_S = 5.0
_PAUSE_S = 0.05
_QUIET_S = 1.0  # after which no more processes are waited for, where none knows how many they are


# ---- links: which hosts exchange data, in rounds, and which host or link is slow by what they measured


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
            message = f"all {len(of_host)} of its links are slow: {_format_link(worst, found[worst])}, and {usual}"
            yield host, Check("slow host", message, "leave the node out; tell the site", FAILED)
    for pair in sorted(left):
        message = f"{_format_link(pair, found[pair])}; {usual}"
        yield pair[1], Check("slow link", message, "tell the site, with both names", FAILED)


def _format_link(pair: Pair, one: LinkSpeed) -> str:
    name = " with ".join(pair)
    return f"{name}: {one.error}" if one.error else f"{name} {one.gbps:.3g} Gb/s, {one.ms:.3g} ms"


# ---- the checker


class CheckRequest(Record):
    """A request to check. `hosts`: those that should answer, where they are known. `folder`: where it writes.
    `line`: the job file's own check. `fast`: without torch and links. `patience`: by how much all limits are longer.
    `variables`: those that the launcher needs."""

    words: tuple[str, ...]
    python: str = sys.executable
    hosts: tuple[str, ...] = ()
    gpus_per_node: int = 0
    folder: str = "."
    line: str = ""
    fast: bool = False
    patience: float = 1.0
    variables: Mapping[str, str] = {}


class CheckReport(Record):
    """The result. `hosts`: name -> its state. `checks`: with their host, "" for the launch as a whole. `links`:
    what was measured, and by what means. `all_reduce_gbps`: None: it was not tried."""

    hosts: Mapping[str, str]
    checks: tuple[tuple[str, Check], ...]
    ranks: int = 0
    links: Mapping[Pair, LinkSpeed] = {}
    means: str = ""
    all_reduce_gbps: float | None = None
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        return all(check.state != FAILED for _, check in self.checks)


class Checker:
    """Checks the nodes by the processes of one launch, whose output goes to stderr."""

    def __init__(self, request: CheckRequest, env: Mapping[str, str]) -> None:
        self._request, self._env = request, env
        self._key = secrets.token_hex(8)
        self._lock = threading.Lock()  # of what follows: each process has a thread here, which may be late
        self._peers: list[Peer] = []  # all connections
        self._is_over = False  # then no more connections are accepted
        self._processes: dict[Peer, Process] = {}
        self._came = 0.0  # when the last process came
        self._measured: set[Peer] = set()
        self._leaders: dict[str, Peer] = {}  # the process of each node that describes it
        self._described: dict[str, threading.Event] = {}  # whether it has
        self.nodes: dict[str, CheckedNode] = {}
        self._began = time.monotonic()

    def check(self) -> CheckReport:
        """Start the launch, judge what its processes answer, and end it."""
        listener = open_listener()
        launcher = self._start_launcher(listener.getsockname()[1])
        mark = os.path.join(self._request.folder, f".hpcddp-check-{self._key}")
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o600))
        except OSError:  # a check of the folder says so
            mark = ""
        threading.Thread(target=self._accept, args=(listener, mark), daemon=True).start()
        try:
            while not self._is_complete(launcher) and self._left_s() > 0:
                time.sleep(_PAUSE_S)
            for host in [*self.nodes]:
                self._set_clock(host)
            self._find_names()
            return self._judge(launcher)
        finally:
            listener.close()
            with self._lock:
                self._is_over = True
            for peer in self._peers:
                with suppress(OSError):  # so that a thread which receives from it ends, too
                    peer.connection.shutdown(socket.SHUT_RDWR)
                peer.connection.close()
            with suppress(OSError):
                os.unlink(mark)
            _end_launcher(launcher)

    def _start_launcher(self, port: int) -> subprocess.Popen[bytes]:
        addresses = ",".join(list_addresses(self._env, os.uname().nodename))
        process = [self._request.python, "-m", "hpcddp.checks.process", f"{self._key}:{port}:{addresses}"]
        words = [*self._request.words, *process]
        return subprocess.Popen(words, env=dict(self._env), stdin=subprocess.DEVNULL, stdout=2)

    def _left_s(self) -> float:
        """Seconds that are left for the processes to describe themselves."""
        return self._began + LOOK_S * self._request.patience - time.monotonic()

    def _is_complete(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Whether all processes that are expected have described themselves."""
        with self._lock:
            processes = [*self._processes.values()]
            if not processes:
                return launcher.poll() is not None
            size = max(process.world_size or 0 for process in processes)
            every_host = all(any(same_host(host, one) for one in self._leaders) for host in self._request.hosts)
            is_quiet = time.monotonic() - self._came > _QUIET_S * self._request.patience
            all_came = len(processes) >= size if size else every_host and is_quiet
            return all_came and all(peer in self._measured or peer.is_gone for peer in self._processes)

    # ---- what the processes answer

    def _accept(self, listener: socket.socket, mark: str) -> None:
        with suppress(OSError):  # it was closed
            while True:
                peer = Peer(listener.accept()[0])
                with self._lock:
                    if self._is_over:
                        peer.connection.close()
                        return
                    self._peers.append(peer)
                threading.Thread(target=self._serve, args=(peer, mark), daemon=True).start()

    def _serve(self, peer: Peer, mark: str) -> None:
        """Serve one process until it has described itself. Other programs are refused."""
        try:
            hello = peer.receive(max(self._left_s(), 1))
        except (OSError, EOFError, ValueError):
            hello = {}
        if hello.get("key") != self._key:
            peer.connection.close()
            return
        process = Process(**hello["process"])
        with self._lock:
            self._processes[peer], self._came = process, time.monotonic()
            leads = self._leaders.setdefault(process.host, peer) is peer
            described = self._described.setdefault(process.host, threading.Event())
        request = self._request
        if leads:
            describe = {"do": "describe", "folder": request.folder, "mark": mark, "line": request.line}
            if (answer := peer.ask(describe, self._left_s())) is None:
                return
            gpus = tuple(Gpu(**gpu) for gpu in answer["gpus"])
            with self._lock:
                self.nodes[process.host] = CheckedNode(**{**answer["node"], "gpus": gpus})
            described.set()  # from now on its processes may use its GPUs
        if described.wait(max(self._left_s(), 0)):
            measure = {"do": "measure", "fast": request.fast, "patience": request.patience, "leads": leads}
            if (answer := peer.ask(measure, self._left_s())) is not None:
                with self._lock:
                    self._record(peer, answer)

    def _record(self, peer: Peer, answer: Answer) -> None:
        """Record a process's findings: of its GPUs what it has tried, and those that no other process sees."""
        process = self._processes[peer] = Process(**answer["process"])
        self._measured.add(peer)
        node = self.nodes[process.host]
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        for gpu in (Gpu(**fields) for fields in answer["gpus"]):
            before = gpus.get(gpu.uuid, gpu)
            if gpu.uuid in process.gpus:
                before = before._replace(tflops=gpu.tflops, copy_gbs=gpu.copy_gbs, error=gpu.error)
            gpus[gpu.uuid] = before
        versions = answer.get("versions", node.versions)
        self.nodes[process.host] = node._replace(gpus=tuple(gpus.values()), versions=versions)
        self._add_errors(process.host, answer.get("errors", {}))

    def _add_errors(self, host: str, errors: Mapping[str, str]) -> None:
        self.nodes[host] = self.nodes[host]._replace(errors={**self.nodes[host].errors, **errors})

    def _ask(self, orders: Mapping[str, Mapping[str, object]], limit_s: float) -> dict[str, Answer]:
        """Send these orders, all at once, and return the nodes' answers; one that is late is left out."""
        answers: dict[str, Answer] = {}

        def ask(host: str) -> None:
            if (answer := self._leaders[host].ask(orders[host], limit_s * self._request.patience)) is not None:
                answers[host] = answer

        threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    # ---- clocks, and rank 0's name

    def _set_clock(self, host: str) -> None:
        before = time.time()
        answer = self._ask({host: {"do": "clock"}}, NAME_S).get(host)
        if answer is not None:
            ahead, behind = answer["time"] - time.time(), before - answer["time"]
            self.nodes[host] = self.nodes[host]._replace(clock_s=max(ahead, 0.0) or -max(behind, 0.0))

    def _find_names(self) -> None:
        """Every node calls rank 0's host, by the name under which its ranks will look for it."""
        rank_0 = next((process.host for process in [*self._processes.values()] if process.rank == 0), None)
        if rank_0 not in self.nodes:
            return
        where = self._ask({rank_0: {"do": "listen"}}, NAME_S).get(rank_0, {"error": "no answer"})
        if "error" in where:
            self._add_errors(rank_0, {"port in use": where["error"]})
            return
        others = [host for host in [*self.nodes] if host != rank_0]
        call = {**where, "do": "reach", "limit_s": NAME_S * self._request.patience}
        answers = self._ask(dict.fromkeys(others, call), 2 * NAME_S)
        errors = {host: answer["errors"] for host, answer in answers.items() if answer["errors"]}
        if len(errors) == len(others) > 1 and all("rank 0's port" in each for each in errors.values()):
            why = errors[others[0]]["rank 0's port"]
            errors = {rank_0: {"rank 0's port": f"no other node reaches it: {why}"}}
        for host, each in errors.items():
            self._add_errors(host, each)

    # ---- links

    def _exchange(self, hosts: Sequence[str], on_gpu: bool) -> dict[Pair, LinkSpeed]:
        """The best that each pair has measured."""
        found: dict[Pair, LinkSpeed] = {}
        rounds = (each for pairs in plan_pairs(hosts, found, on_gpu=on_gpu) for each in split_rounds(pairs))
        for each in rounds:
            if not self._has_time(PAIR_S):
                break
            results = self._run_groups(each, on_gpu, PAIR_S, is_sum=False)
            for pair, answer in zip(each, results, strict=True):
                one = LinkSpeed(answer.get("gbps", 0.0), answer.get("ms", 0.0), answer.get("error", ""))
                found[pair] = max(one, found.get(pair, one), key=lambda speed: (not speed.error, speed.gbps))
        return found

    def _has_time(self, needed_s: float) -> bool:
        """Whether another part may begin that takes so long at most."""
        return time.monotonic() - self._began < (MOST_S - needed_s) * self._request.patience

    def _run_groups(
        self, groups: Sequence[Sequence[str]], on_gpu: bool, limit_s: float, *, is_sum: bool
    ) -> list[Answer]:
        """Run the groups' exchanges side by side, by one device of each host: the answers of each group's first host;
        where one has failed, its `error`, and which `host`."""
        limit = {"limit_s": limit_s * self._request.patience}
        opening = {"do": "device", "what": "open_store", **limit}
        opened = self._ask({group[0]: opening for group in groups}, limit_s + _FIRST_S)
        shared = {"do": "device", "what": "exchange", "backend": "nccl" if on_gpu else "gloo", "is_sum": is_sum}
        orders: dict[str, Mapping[str, object]] = {}
        for group in groups:
            if "port" in (where := opened.get(group[0], {})):
                one = {**shared, **limit, **where, "size": len(group)}
                orders |= {host: {**one, "rank": rank} for rank, host in enumerate(group)}
        answers = {host: answer for host, answer in opened.items() if "error" in answer}
        answers |= self._ask(orders, limit_s + _FIRST_S)
        late = {"error": f"no answer in {limit['limit_s']:.0f} s"}
        found: list[Answer] = []
        for group in groups:
            results = {host: answers.get(host, late) for host in group}
            wrong = [host for host in group if "error" in results[host]]
            found.append({"host": wrong[0], **results[wrong[0]]} if wrong else results[group[0]])
        return found

    # ---- the report

    def _judge(self, launcher: subprocess.Popen[bytes]) -> CheckReport:
        processes = tuple(self._processes.values())
        hosts = self._list_hosts()
        job = CheckedJob([*self.nodes.values()], processes, self._request.gpus_per_node)
        checks = [*self._list_silent(hosts, launcher), *judge_ranks(processes, hosts), *judge_nodes(job)]
        good = _list_good((host for host in hosts if host in self.nodes), checks)  # in the order of the allocation
        on_gpu = bool(good) and all(self.nodes[host].gpus for host in good)
        pairs: dict[Pair, LinkSpeed] = {}
        rate = None
        if not self._request.fast and len(good) > 1:
            pairs = self._exchange(good, on_gpu)
            checks += judge_links(pairs, on_gpu=on_gpu)
            left = _list_good(good, checks)
            if len(left) > 1 and self._has_time(0):
                (results,) = self._run_groups([left], on_gpu, ALL_S, is_sum=True)
                rate = results.get("all_reduce_gbps")
                if "error" in results:
                    message = f"no sum over {len(left)} hosts: {results['host']}: {results['error']}"
                    checks.append(("", Check("all-reduce", message, "hpcddp diagnose")))
        states = dict.fromkeys(hosts, NOT_CHECKED) | dict.fromkeys(self.nodes, OK)
        for state in (WARNING, FAILED):
            states |= {host: state for host, check in checks if host and check.state == state}
        means, seconds = "NCCL" if on_gpu else "gloo", time.monotonic() - self._began
        return CheckReport(states, tuple(checks), len(processes), pairs, means, rate, seconds)

    def _list_hosts(self) -> list[str]:
        """The hosts that should be there, by the names that they give themselves where they have come."""
        there = [*self._leaders]
        named = [next((one for one in there if same_host(host, one)), host) for host in self._request.hosts]
        return [*named, *(host for host in there if host not in named)]

    def _list_silent(self, hosts: Sequence[str], launcher: subprocess.Popen[bytes]) -> Iterator[tuple[str, Check]]:
        """Hosts that never came, or that have not described themselves in time."""
        if not self._processes and (status := launcher.poll()) is not None:
            what = self._request.words[0] if self._request.words else self._request.python
            message = f"{what} ended with status {status}, and no process called"
            yield "", Check("launcher", message, "what it has printed says why", FAILED)
            return
        late = f"did not answer in {LOOK_S * self._request.patience:.0f} s"
        size = max((process.world_size or 0 for process in [*self._processes.values()]), default=0)
        missing = "no process of the launch is there" if len(self._processes) >= size > 0 else late
        for host in hosts:
            if self._leaders.get(host) not in self._measured:
                message = f"it came, and {late}" if host in self._leaders else missing
                yield host, Check("answer", message, "leave the node out; tell the site", FAILED)


def _end_launcher(launcher: subprocess.Popen[bytes]) -> None:
    """End it: without a signal at first, since its processes' connections are closed."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        launcher.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_S)
            return


def _list_good(hosts: Iterable[str], checks: Iterable[tuple[str, Check]]) -> list[str]:
    failed = {host for host, check in checks if check.state == FAILED}
    return [host for host in hosts if host not in failed]


def format_report(report: CheckReport) -> str:
    """Format a report for people: faults first, then the numbers, the sum last."""
    lines = []
    for host, check in report.checks:
        where = f"{host}: " if host else ""
        lines += [f"{check.state:8} {where}{check.name}: {check.message}", f"{'':9}hint: {check.remedy}"]
    usual = find_usual(report.links)
    if not usual.error:
        message = f"median of {format_count(len(report.links), 'pair')}: {usual.gbps:.3g} Gb/s and {usual.ms:.3g} ms"
        lines.append(f"links    {report.means}, {message}")
    if report.all_reduce_gbps is not None:
        lines.append(f"links    all-reduce over the hosts: {report.all_reduce_gbps:.3g} Gb/s")
    failed = [host for host, state in report.hosts.items() if state == FAILED]
    count = f"{format_count(len(report.hosts), 'host')}, {format_count(report.ranks, 'process')}"
    sum_up = f"failed: {', '.join(failed)}" if failed else "passed" if report.is_well else "failed"
    return "".join(f"{line}\n" for line in [*lines, f"{count} in {report.seconds:.1f} s: {sum_up}"])


def report_record(report: CheckReport) -> dict[str, Any]:
    """The report for programs."""
    return {
        **report._asdict(),
        "ok": report.is_well,
        "checks": [{"host": host, **check._asdict()} for host, check in report.checks],
        "links": [{"hosts": [*pair], **one._asdict()} for pair, one in report.links.items()],
    }
