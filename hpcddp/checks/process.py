"""A process of a launch under check: it looks at itself and its node, calls the checker, and does what that says.

One process of each node looks at the node. Nothing here waits for another node: a process that cannot call the checker
prints what it is, behind MARK, and the launcher carries that.
"""

from __future__ import annotations

import _thread
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

from hpcddp.checks.environment import look_at_machine, run_checks
from hpcddp.checks.links import run_exchange, serve_exchange
from hpcddp.checks.node import MARK, Gpu, Node, Process, look_at_node, reach, taken_gpus, variables_alike
from hpcddp.errors import HpcddpError, LaunchError
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.network import look_around, settle_interface
from hpcddp.ranks.reach import find_local_address
from hpcddp.ranks.rendezvous import LOWEST, ephemeral_range, port_candidates
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_CONNECT_S, _CALL_S = 3.0, 12.0
_PROGRAM_S = 10.0  # for nvidia-smi, or the job file's own line
GPU_S, IMPORT_S = 15.0, 25.0  # for one order to a device; for `import torch`
_REAL_WORKER = (sys.executable, "-m", "hpcddp.checks.device")


class Worker:
    """A process with one device, and torch. It is killed once it does not answer in time."""

    def __init__(self, env: Mapping[str, str], words: Sequence[str] = _REAL_WORKER) -> None:
        self._process = subprocess.Popen(
            [*words], env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._rest = b""

    def read(self, end: float, what: str) -> dict[str, Any]:
        """The next answer, by this time of the monotonic clock; with the key `error` where there is none."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        said = b""
        streams = [process.stdout, process.stderr]
        while b"\n" not in self._rest:
            ready = select.select(streams, [], [], max(end - time.monotonic(), 0))[0]
            if not ready:
                self.close()
                return {"error": what}
            data = {stream: os.read(stream.fileno(), 65536) for stream in ready}
            said = (said + data.get(process.stderr, b""))[-8192:]
            self._rest += data.get(process.stdout, b"")
            streams = [stream for stream in streams if data.get(stream) != b""]
            if not streams:
                status = process.wait()
                lines = said.decode(errors="replace").strip().splitlines()
                return {"error": lines[-1] if lines else f"its process ended with {status}"}
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, limit_s: float, order: Mapping[str, object]) -> dict[str, Any]:
        """What it answers to an order."""
        self.tell(order)
        return self.read(time.monotonic() + limit_s, f"it did not answer in {limit_s:.0f} s, and was killed")

    def tell(self, order: Mapping[str, object]) -> None:
        """Give it an order, whose answer is read later."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def find_place(env: Mapping[str, str], host: str) -> tuple[Process, Launch]:
    """What this process is among the ranks. An error of the launch is said in it."""
    launch = Launch(env, host, strict=False)
    process = Process(host, cpus=tuple(sorted(os.sched_getaffinity(0))), env=variables_alike(env))
    try:
        info = launch.info
        found = run_checks(env, info, launch.rendezvous, look_at_machine(env)) if info.launcher != "none" else []
        numbers = info.rank, info.world_size, info.local_rank, info.local_world_size
        master = launch.rendezvous.master_addr or ""
    except HpcddpError as error:
        return process._replace(error=str(error)), launch
    checks = tuple((one.name, one.message, one.remedy, one.state) for one in found)
    return Process(host, *numbers, "", master, process.cpus, (), process.env, checks), launch


class CheckedProcess:
    """This process, for the checker. `fast`: without torch."""

    def __init__(self, env: Mapping[str, str], host: str) -> None:
        self._env, self._host = env, host
        self.process, self._launch = find_place(env, host)
        self._workers: list[Worker] = []
        self._listener: socket.socket | None = None

    def look(self, folders: Sequence[str], line: str, *, fast: bool, leads: bool, patience: float) -> dict[str, Any]:
        """What this node is, where this process `leads` it, and which GPUs the process takes. Each GPU has a process
        of its own."""
        folders = [*folders, self._env.get("TMPDIR") or "/tmp"]  # noqa: S108  # looked at
        node = look_at_node(self._host, folders, self._ask, line if leads else "")
        try:
            self.process = self.process._replace(gpus=taken_gpus(node.gpus, self._env, self.process))
        except LaunchError as error:
            self.process = self.process._replace(error=self.process.error or str(error))
        alone = [{**self._env, "CUDA_VISIBLE_DEVICES": uuid} for uuid in self.process.gpus] or [self._env][: int(leads)]
        began = time.monotonic()
        workers = [] if fast else [*map(Worker, alone)]
        limit_s = IMPORT_S * patience
        says = [worker.read(began + limit_s, f"import torch took more than {limit_s:.0f} s") for worker in workers]
        gpus = self._try_gpus(node, workers, says, GPU_S * patience) if self.process.gpus else node.gpus
        for worker in workers[1:]:
            worker.close()
        self._workers = workers[:1]
        node = node._replace(gpus=gpus, interface_error=self._find_interface_error(bool(gpus)))
        if leads and says:
            torch = next((one for one in says if "versions" in one), says[0])
            versions = dict(torch.get("versions", {}))
            if gpus and gpus[0].driver:
                versions["driver"] = gpus[0].driver
            node = node._replace(versions=versions, torch_error=torch.get("error", ""))
        return {"process": self.process._asdict(), "node": _as_dict(node) if leads or self.process.gpus else None}

    def _try_gpus(
        self, node: Node, workers: Sequence[Worker], says: Sequence[Mapping[str, Any]], limit_s: float
    ) -> tuple[Gpu, ...]:
        """The GPUs, those of this process with what they have measured, all side by side."""
        found: dict[str, Mapping[str, Any]] = {}
        for worker, said in zip(workers, says, strict=True):
            if "error" not in said and said["devices"]:
                worker.tell({"do": "measure"})
        late = f"it did not answer in {limit_s:.0f} s, and its process was killed"
        end = time.monotonic() + limit_s
        for uuid, worker, said in zip(self.process.gpus, workers, says, strict=False):
            if "error" in said:
                found[uuid] = said
            elif not said["devices"]:
                found[uuid] = {"error": f"torch {said['versions']['torch']} sees no device"}
            else:
                found[uuid] = worker.read(end, late)
        return tuple(gpu._replace(**found[gpu.uuid]) if gpu.uuid in found else gpu for gpu in node.gpus)

    def _find_interface_error(self, on_gpu: bool) -> str:
        """Why the network that the ranks are to use is none of this host's."""
        try:
            find_local_address(self._env, self._host)
            peer = self.process.master if self.process.master not in {"", self._host} else None
            settle_interface(self._env, "nccl" if on_gpu else "gloo", look_around(self._host, peer, self._env))
        except LaunchError as error:
            return error.message
        return ""

    def _ask(self, words: list[str]) -> tuple[int, str]:
        """Status and output of a program: 127 where there is none, 124 where it does not end in time."""
        try:
            done = subprocess.run(
                words,
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROGRAM_S,
                check=False,
            )
        except FileNotFoundError:
            return 127, ""
        except subprocess.TimeoutExpired:
            return 124, f"{words[0]} did not answer in {_PROGRAM_S:.0f} s"
        except OSError as error:
            return 126, error.strerror or ""
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

    def listen(self, port: int | None) -> dict[str, Any]:
        """Listen on rank 0's port, or a free one of the kind that ranks find for themselves: this address, and the
        port."""
        if self._listener is not None:
            self._listener.close()
        wanted = [port] if port else port_candidates(f"{os.getpid()} {time.time()}", 16, ephemeral_range()) or [LOWEST]
        why = ""
        for one in wanted:
            both = socket.has_dualstack_ipv6()
            try:
                family = socket.AF_INET6 if both else socket.AF_INET
                self._listener = socket.create_server(("", one), family=family, backlog=256, dualstack_ipv6=both)
            except OSError as error:
                why = f"rank 0's port {one} cannot be listened on: {(error.strerror or str(error)).lower()}"
                continue
            with suppress(LaunchError):
                return {"address": find_local_address(self._env, self._host), "port": one}
            return {"address": self._host, "port": one}
        return {"error": why}

    def greet(self, token: str) -> dict[str, Any]:
        """Rank 0's side: give everybody who calls from now on the token."""
        assert self._listener is not None
        _thread.start_new_thread(_greet, (self._listener, token.encode()))
        return {}

    def reach(self, host: str, port: int, token: str, limit_s: float) -> dict[str, Any]:
        """The others' side."""
        resolve_error, reach_error = reach(self.process.master or host, port, token.encode(), limit_s)
        return {"resolve_error": resolve_error, "reach_error": reach_error}

    def serve(self, limit_s: float) -> dict[str, Any]:
        """The answering side of an exchange over TCP."""
        assert self._listener is not None
        with suppress(OSError):
            serve_exchange(self._listener, limit_s)
        return {}

    def call(self, address: str, port: int, limit_s: float) -> dict[str, Any]:
        """The calling side."""
        return run_exchange(address, port, limit_s)._asdict()

    def device(self, limit_s: float, **order: object) -> dict[str, Any]:
        """An exchange of the worker's."""
        if not self._workers:
            self._workers = [Worker(self._env)]
            self._workers[0].read(time.monotonic() + limit_s, "import torch took too long")
        answer = self._workers[0].ask(limit_s, {"do": "exchange", "limit_s": limit_s, **order})
        if "error" in answer:
            self._workers.pop().close()
        return answer

    def clock(self) -> dict[str, float]:
        """The time here."""
        return {"time": time.time()}

    def close(self) -> None:
        """End what was started."""
        for worker in self._workers:
            worker.close()


def _as_dict(node: Node) -> dict[str, Any]:
    return {**node._asdict(), "gpus": [gpu._asdict() for gpu in node.gpus]}


def main(word: str, env: Mapping[str, str]) -> int:
    """Be checked. `word`: the key and the port of the checker, and its addresses. Status 0, whatever is found."""
    key, port, addresses = word.split(":", 2)
    me = os.uname().nodename
    checked = CheckedProcess(env, me)
    connection, why = _connect(addresses.split(","), int(port))
    hello = {"key": key, "pid": os.getpid(), "process": checked.process._asdict()}
    try:
        if connection is None:
            print(MARK + json.dumps({**hello, "error": f"{me} does not reach the checker: {why}"}), flush=True)
            return 0
        with connection:
            connection.sendall(json.dumps(hello).encode() + b"\n")
            for line in connection.makefile("rb"):
                order = json.loads(line)
                number, what = order.pop("id"), order.pop("do")
                answer = getattr(checked, what)(**order)
                connection.sendall(json.dumps({"id": number, **answer}).encode() + b"\n")
    except OSError:
        return 0  # the checker has ended
    finally:
        checked.close()
    return 0


def _greet(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # it was closed
        while True:
            caller, _ = listener.accept()
            with caller, suppress(OSError):
                caller.sendall(token)


def _connect(hosts: Sequence[str], port: int) -> tuple[socket.socket | None, str]:
    """A connection, or why there is none at any of the addresses."""
    end, told = time.monotonic() + _CALL_S, ""
    for host in hosts:
        left = min(end - time.monotonic(), _CONNECT_S)
        if left <= 0:
            break
        try:
            connection = socket.create_connection((host, port), left)
        except OSError as error:
            said = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
            told = told or f"{host}, port {port}: {said}"
            continue
        connection.settimeout(None)
        return connection, ""
    return None, told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], dict(os.environ)))
