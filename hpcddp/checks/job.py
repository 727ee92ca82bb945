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

from hpcddp.checks.environment import FAILED, NOT_ASKED, OK, WARNING, Check
from hpcddp.checks.links import LinkSpeed, count_rounds, find_slow, judge_links, plan_round
from hpcddp.checks.node import MARK, CheckedJob, Gpu, Process, judge_nodes, judge_ranks, read_node, read_process
from hpcddp.ranks.reach import list_addresses
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import same_host
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO, Any

    from hpcddp.checks.links import Pair
    from hpcddp.checks.node import CheckedNode

LOOK_S, NAME_S, PAIR_S, ALL_S, CLOCK_S = 30.0, 5.0, 8.0, 8.0, 1.0
#: After which no further round begins.
MOST_S = 60.0
_FIRST_S = 3.0  # for the first exchange of a device: NCCL sets up what the next ones have
_TRIES = 3  # of a pair, until it is believed to be slow
_END_S = 5.0


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
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
        self._key = secrets.token_hex(8)
        self._callers: list[_Caller] = []
        self._number = 0
        self._began = time.monotonic()
        self._pair_s, self._all_s = PAIR_S * request.patience, ALL_S * request.patience
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
                        self._unreached.append((read_process(found["process"]), found["error"]))

    def _is_complete(self) -> bool:
        """Whether all that are expected have said what they are."""
        called = [caller for caller in self._callers if caller.process is not None]
        size = max((caller.process.world_size or 1 for caller in called if caller.process), default=None)
        if size is not None and len(called) + len(self._unreached) >= size:
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
        process = caller.process = read_process(said["process"])
        if process.host in self.nodes:
            self._measure(caller)
        elif process.host not in self._leaders:
            self._leaders[process.host] = caller
            order = {"folders": self._request.folders, "line": self._request.line}
            self._order(caller, lambda answer: self._note_node(process.host, answer), "look", **order)

    def _note_node(self, host: str, answer: dict[str, Any]) -> None:
        """A node has looked at itself: from now on its processes may use its GPUs."""
        self.nodes[host] = read_node(answer["node"])
        for caller in self._callers:
            if caller.process is not None and caller.process.host == host:
                self._measure(caller)

    def _measure(self, caller: _Caller) -> None:
        assert caller.process is not None
        leads = self._leaders[caller.process.host] is caller
        order = {"fast": self._request.fast, "patience": self._request.patience, "leads": leads}
        self._order(caller, lambda answer: self._note(caller, answer), "measure", **order)

    def _note(self, caller: _Caller, answer: dict[str, Any]) -> None:
        """What a process has found out: of its GPUs what it has tried, and those that no other process sees."""
        process = caller.process = read_process(answer["process"])
        caller.is_measured = True
        node = self.nodes[process.host]
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        for gpu in (Gpu(**said) for said in answer["gpus"]):
            before = gpus.get(gpu.uuid, gpu)
            if gpu.uuid in process.gpus:
                before = before._replace(tflops=gpu.tflops, copy_gbs=gpu.copy_gbs, error=gpu.error)
            gpus[gpu.uuid] = before
        self.nodes[process.host] = node._replace(gpus=tuple(gpus.values()), **answer["of_node"])

    def _order(self, caller: _Caller, heard: Callable[[dict[str, Any]], None], what: str, **order: object) -> None:
        self._number += 1
        caller.pending[self._number] = heard
        try:
            caller.connection.sendall(json.dumps({"id": self._number, "do": what, **order}).encode() + b"\n")
        except OSError:
            del caller.pending[self._number]

    def ask(self, orders: Mapping[str, tuple[str, Mapping[str, Any]]], limit_s: float) -> dict[str, dict[str, Any]]:
        """What the nodes answer to these orders, all given at once; one that does not answer in time is left out."""
        answers: dict[str, dict[str, Any]] = {}
        for host, (what, order) in orders.items():
            caller = self._leaders[host]
            if not caller.is_gone:
                self._order(caller, lambda answer, host=host: answers.__setitem__(host, answer), what, **order)  # type: ignore[misc]
        wanted = [host for host in orders if not self._leaders[host].is_gone]
        done = lambda: all(host in answers or self._leaders[host].is_gone for host in wanted)  # noqa: E731
        self._hear(done, time.monotonic() + limit_s * self._request.patience)
        return answers

    # Clocks, and rank 0's name.

    def _set_clocks(self) -> None:
        for host in [*self.nodes]:
            before = time.time()
            answer = self.ask({host: ("clock", {})}, CLOCK_S).get(host)
            after = time.time()
            if answer is None:
                continue
            ahead, behind = answer["time"] - after, before - answer["time"]
            self.nodes[host] = self.nodes[host]._replace(clock_s=max(ahead, 0.0) or -max(behind, 0.0))

    def _find_names(self) -> None:
        """Every node calls rank 0's host, by the name under which its ranks will look for it."""
        rank_0 = next((c.process.host for c in self._leaders.values() if c.process and c.process.rank == 0), None)
        others = [host for host in self.nodes if host != rank_0]
        if rank_0 not in self.nodes or not others:
            return
        where = self.ask({rank_0: ("listen", {"port": self._read_port()})}, NAME_S).get(rank_0, {})
        if "port" not in where:
            self.nodes[rank_0] = self.nodes[rank_0]._replace(reach_error=where.get("error", "no answer"))
            return
        token = self._key
        call = {
            "host": where["address"],
            "port": where["port"],
            "token": token,
            "limit_s": NAME_S * self._request.patience,
        }
        orders: dict[str, tuple[str, Mapping[str, Any]]] = dict.fromkeys(others, ("reach", call))
        self.ask({rank_0: ("greet", {"token": token})}, NAME_S)
        answers = self.ask(orders, 2 * NAME_S)
        failed = [host for host in others if any(answers.get(host, {}).values())]
        if len(others) > 1 and len(failed) == len(others) and not any(answers[h]["resolve_error"] for h in failed):
            told = f"no other node reaches it: {answers[failed[0]]['reach_error']}"
            self.nodes[rank_0] = self.nodes[rank_0]._replace(reach_error=told)
            return
        for host in failed:
            self.nodes[host] = self.nodes[host]._replace(**answers[host])

    def _read_port(self) -> int | None:
        text = self._env.get("MASTER_PORT", "")
        return int(text) if text.isdecimal() and 0 < int(text) < 65536 else None

    # Links.

    def _exchange(self, hosts: Sequence[str], on_gpu: bool) -> dict[Pair, LinkSpeed]:
        """What the pairs have measured, round after round; a slow one is tried again."""
        found: dict[Pair, LinkSpeed] = {}
        for number in range(count_rounds(len(hosts))):
            if not self._has_time(PAIR_S):
                break
            found |= self._run_round(plan_round(hosts, number, found), on_gpu)
        for _ in range(_TRIES - 1):
            again = sorted(find_slow(found, by_tcp=not on_gpu))
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
        where = self.ask({a: ("listen", {"port": None}) for a, _ in pairs}, NAME_S)
        orders: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for a, b in pairs:
            if "port" not in where.get(a, {}):
                continue
            if on_gpu:
                one = {"size": 2, "address": where[a]["address"], "port": where[a]["port"] + 1, "limit_s": self._pair_s}
                orders |= {a: ("device", {**one, "rank": 0}), b: ("device", {**one, "rank": 1})}
            else:
                call = {"address": where[a]["address"], "port": where[a]["port"], "limit_s": self._pair_s / 2}
                orders |= {a: ("serve", {"limit_s": self._pair_s / 2}), b: ("call", call)}
        answers = self.ask(orders, PAIR_S + _FIRST_S)
        found = {}
        for pair in pairs:
            said = answers.get(pair[1], {"error": f"no answer in {self._pair_s:.0f} s"})
            numbers = {name: said[name] for name in LinkSpeed._fields if name in said}
            found[pair] = LinkSpeed(**numbers)
        return found

    def _reduce(self, hosts: Sequence[str]) -> tuple[float | None, str]:
        """Gb/s of a sum over all hosts, one device of each; and why there is none."""
        where = self.ask({hosts[0]: ("listen", {"port": None})}, NAME_S).get(hosts[0], {})
        if "port" not in where:
            return None, "its first host cannot listen"
        one = {"size": len(hosts), "address": where["address"], "port": where["port"] + 1, "limit_s": self._all_s}
        answers = self.ask({host: ("device", {**one, "rank": at}) for at, host in enumerate(hosts)}, ALL_S + _FIRST_S)
        errors = [(host, answers.get(host, {"error": "no answer"}).get("error")) for host in hosts]
        wrong = [f"{host}: {error}" for host, error in errors if error]
        return (None, wrong[0]) if wrong else (answers[hosts[0]]["all_reduce_gbps"], "")

    # The report.

    def _judge(self) -> CheckReport:
        processes = tuple(caller.process for caller in self._callers if caller.process is not None)
        job = CheckedJob(tuple(self.nodes.values()), processes, self._request.gpus_per_node)
        everybody = (*processes, *(process for process, _ in self._unreached))
        checks = [*self._list_silent(everybody), *judge_ranks(everybody, self._expected(everybody)), *judge_nodes(job)]
        failed = {host for host, check in checks if check.state == FAILED}
        good = [host for host in self.nodes if host not in failed]
        on_gpu = bool(good) and all(self.nodes[host].gpus for host in good)
        pairs: dict[Pair, LinkSpeed] = {}
        rate, means = None, "NCCL" if on_gpu else "TCP"
        if not self._request.fast and len(good) > 1:
            pairs = self._exchange(good, on_gpu)
            checks += judge_links(pairs, by_tcp=not on_gpu)
            slow = {host for host, check in checks if check.state == FAILED}
            left = [host for host in good if host not in slow]
            if len(left) > 1 and self._has_time(0):
                rate, why = self._reduce(left)
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
        if everybody and len(everybody) >= max(process.world_size or 1 for process in everybody):
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
