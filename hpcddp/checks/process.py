"""A process of a launch under check: it looks at itself and its node, calls the checker, and does what that says.

One process of each node looks at the node. Nothing here waits for another node: a process that cannot call the checker
prints what it is, behind MARK, and the launcher carries that.
"""

from __future__ import annotations

import _thread
import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256

from hpcddp.checks.environment import look_at_machine, run_checks
from hpcddp.checks.links import run_exchange, serve_exchange
from hpcddp.checks.node import MARK, SHM, CheckedNode, Gpu, Process
from hpcddp.errors import HpcddpError, LaunchError
from hpcddp.ranks.device import choose_devices, read_gpus_per_rank, visible_devices
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.network import look_around, settle_interface
from hpcddp.ranks.reach import find_local_address
from hpcddp.ranks.rendezvous import LOWEST, ephemeral_range, port_candidates
from hpcddp.record import TYPE_CHECKING
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_CONNECT_S, _CALL_S = 3.0, 12.0
_PROGRAM_S = 10.0  # for nvidia-smi, or the job file's own line
GPU_S, IMPORT_S = 15.0, 25.0  # for one order to a device; for `import torch`
_REAL_WORKER = (sys.executable, "-m", "hpcddp.checks.device")


# Looking. Each part gives what it can, and leaves the rest unknown.


_SPEED_S = 0.2
_BLOCK = 65536
_MB = 1024 * 1024
#: How the variables begin that every rank of a job should have alike.
_ALIKE = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "OMP_NUM", "MKL_", "PYTORCH_", "RCCL_", "HF_", "MASTER_")
_ALIKE_WHOLE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "http_proxy", "https_proxy", "no_proxy", "VIRTUAL_ENV")


def variables_alike(env: Mapping[str, str]) -> dict[str, str]:
    """Those variables of a rank that should be the same in all of them; of a list of folders each once, since launchers
    put their own in front again and again."""
    found = {name: env[name] for name in env if name.startswith(_ALIKE) or name in _ALIKE_WHOLE}
    lists = {
        name: ":".join(dict.fromkeys(filter(None, text.split(":"))))
        for name, text in found.items()
        if name.endswith("PATH")
    }
    return found | lists


def count_cpus(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """How many CPUs this process may use at once: those of its affinity, and no more than the quota of its control
    group or of one above it."""
    most = float(len(os.sched_getaffinity(0)))
    lines = list[str]()
    with suppress(OSError), open(own, encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):  # "": version 2
            continue
        parts = [part for part in path.split("/") if part]
        for folder in [os.path.join(root, controllers, *parts[:depth]) for depth in range(len(parts) + 1)]:
            with suppress(OSError, ValueError):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = " ".join(_read(os.path.join(folder, name)) for name in names).split()
                most = min(most, int(quota) / int(period)) if int(quota) > 0 else most  # "max": none
    return round(most, 2)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def measure_cpu(limit_s: float = _SPEED_S) -> float:
    """MB/s of a hash: the best of many short tries, so that what else runs here matters little."""
    block, best, end = bytes(_BLOCK), 1.0, time.monotonic() + limit_s
    while time.monotonic() < end:
        began = time.perf_counter()
        sha256(block).digest()
        best = min(best, time.perf_counter() - began)
    return _BLOCK / _MB / best


def look_at_disk(folder: str) -> tuple[int, int, str]:
    """MiB and files that this user may still write there, -1 files where the file system counts none, and why a small
    file cannot be written. A quota shows by writing alone."""
    path = os.path.join(folder, f".hpcddp-check-{os.uname().nodename}-{os.getpid()}")
    error = ""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = _MB
            while left:
                left -= os.write(number, bytes(min(left, _BLOCK)))
            os.fsync(number)
        finally:
            os.close(number)
            os.unlink(path)
    except OSError as problem:
        error = problem.strerror or str(problem)
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, -1, error
    return found.f_bavail * found.f_frsize // _MB, found.f_favail if found.f_files else -1, error


def look_at_memory(path: str = "/proc/meminfo") -> tuple[int | None, int | None]:
    """MiB of memory, and how many of them are free for a program."""
    numbers: dict[str, int] = {}
    with suppress(OSError), open(path, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            numbers[name] = int(rest.split()[0]) // 1024
    return numbers.get("MemTotal"), numbers.get("MemAvailable")


_SMI = "uuid,name,driver_version,memory.used,ecc.errors.uncorrected.volatile.total"


def read_gpus(rows: str, remapped: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's answers: a line of CSV each, and the report on rows and pages of memory."""
    pending = {
        part.partition("\n")[0].strip()
        for part in remapped.split("\nGPU ")[1:]
        if any(
            word in line and line.rstrip().endswith(": Yes")
            for line in part.splitlines()
            for word in ("Pending", "Remapping Failure Occurred", "Pending Page Blacklist")
        )
    }
    gpus = []
    for line in rows.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_SMI.split(",")) + 1:
            bus, uuid, name, driver, used, errors = fields
            gpus.append(Gpu(uuid, name, driver, read_number(used) or 0, read_number(errors) or 0, bus in pending))
    return tuple(gpus)


def look_at_gpus(ask: Callable[[list[str]], tuple[int, str]]) -> tuple[tuple[Gpu, ...], tuple[str, ...], str]:
    """The GPUs, what runs on them, and why the driver does not say it. `ask`: the status and output of a command."""
    status, rows = ask(["nvidia-smi", f"--query-gpu=pci.bus_id,{_SMI}", "--format=csv,noheader,nounits"])
    if status == 127:  # no such program
        return (), (), ""
    if status:
        said = (rows.strip().splitlines() or [f"status {status}"])[0]
        return (), (), f"nvidia-smi: {said}"
    gpus = read_gpus(rows, ask(["nvidia-smi", "-q", "-d", "ROW_REMAPPER,PAGE_RETIREMENT"])[1])
    apps = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    return gpus, tuple(line.strip() for line in ask(apps)[1].splitlines() if line.strip()), ""


def taken_gpus(gpus: Sequence[Gpu], env: Mapping[str, str], process: Process) -> tuple[str, ...]:
    """The unique names of the GPUs that this process would take, as training does; all for one that is alone on its
    node. LaunchError where it could take none."""
    mask = visible_devices(env)
    known = [gpu.uuid for gpu in gpus]
    if mask is not None:
        numbers = [read_number(entry) for entry in mask]
        shown = [
            entry if at is None else known[at] if at < len(known) else entry
            for entry, at in zip(mask, numbers, strict=True)
        ]
        known = shown if len(shown) <= len(gpus) else known
    if not known or process.local_world_size in {None, 1}:
        return tuple(known)
    chosen = choose_devices(len(known), process.local_rank, process.local_world_size, read_gpus_per_rank(env))
    return tuple(known[at] for at in chosen)


def look_at_node(
    host: str, folders: Sequence[str], ask: Callable[[list[str]], tuple[int, str]], line: str
) -> CheckedNode:
    """All that a node can say in a second or two, but for torch, GPUs' speeds and what others see of it."""
    gpus, apps, smi_error = look_at_gpus(ask)
    memory, free = look_at_memory()
    shm = None
    with suppress(OSError):
        found = os.statvfs(SHM)
        shm = found.f_bavail * found.f_frsize // _MB
    return CheckedNode(
        host,
        count_cpus(),
        measure_cpu(),
        _most_files(),
        shm,
        free,
        memory,
        {folder: look_at_disk(folder) for folder in folders},
        gpus,
        apps,
        smi_error=smi_error,
        line=ask(["sh", "-c", line])[0] if line else None,
    )


def _most_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


# Names and interfaces as the ranks will use them.


def reach(host: str, port: int, token: bytes, limit_s: float = 5.0) -> tuple[str, str]:
    """Why the name of rank 0's host is wrong here, and why its port is not reached; one of them is empty. `token`: what
    rank 0 answers."""
    me = os.uname().nodename
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"rank 0's host {host!r} does not resolve: {error.strerror or error}", ""
    why = ""
    for family, kind, number, _, where in found:
        with socket.socket(family, kind, number) as connection:
            connection.settimeout(limit_s)
            address = str(where[0])
            try:
                connection.connect(where)
                if connection.recv(len(token)) == token:
                    return "", ""
                return f"rank 0's host {host!r} is {address} for {me}, and that is another host", ""
            except OSError as error:
                if address.startswith("127.") or address == "::1":
                    return f"rank 0's host {host!r} is {address} for {me}: {me} itself", ""
                said = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
                why = f"rank 0 at {host} ({address}), port {port}: {said}"
    return "", why


# A device, and this process for the checker.


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


def identify_process(env: Mapping[str, str], host: str) -> tuple[Process, Launch]:
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
    """This process, for the checker: each method but those with an underscore is an order."""

    def __init__(self, env: Mapping[str, str], host: str) -> None:
        self._env, self._host = env, host
        self.process, self._launch = identify_process(env, host)
        self._workers: list[Worker] = []
        self._gpus: tuple[Gpu, ...] = ()
        self._listener: socket.socket | None = None

    def look(self, folders: Sequence[str], line: str) -> dict[str, Any]:
        """What this node is, before anything computes on its GPUs."""
        folders = [*folders, self._env.get("TMPDIR") or "/tmp"]  # noqa: S108  # looked at
        node = look_at_node(self._host, folders, self._ask, line)
        self._gpus = node.gpus
        return {"node": _as_dict(node)}

    def measure(self, *, fast: bool, leads: bool, patience: float) -> dict[str, Any]:
        """What its GPUs and torch can do, each GPU in a process of its own. `leads`: whether it speaks for its node.
        `fast`: nothing is computed."""
        gpus = self._gpus if leads else look_at_gpus(self._ask)[0]
        try:
            self.process = self.process._replace(gpus=taken_gpus(gpus, self._env, self.process))
        except LaunchError as error:
            self.process = self.process._replace(error=self.process.error or str(error))
        alone = [{**self._env, "CUDA_VISIBLE_DEVICES": uuid} for uuid in self.process.gpus] or [self._env][: int(leads)]
        limit_s = IMPORT_S * patience
        end = time.monotonic() + limit_s
        workers = [] if fast else [*map(Worker, alone)]
        says = [worker.read(end, f"import torch took more than {limit_s:.0f} s") for worker in workers]
        if workers and self.process.gpus:
            gpus = self._try_gpus(gpus, workers, says, GPU_S * patience)
        for worker in workers[1:]:
            worker.close()
        self._workers = workers[:1]
        of_node: dict[str, Any] = {"interface_error": self._find_interface_error(bool(gpus))}
        if says:
            torch = next((one for one in says if "versions" in one), says[0])
            versions = {**torch.get("versions", {}), **({"driver": gpus[0].driver} if gpus and gpus[0].driver else {})}
            of_node |= {"versions": versions, "torch_error": torch.get("error", "")}
        process = self.process._asdict()
        return {"process": process, "gpus": [gpu._asdict() for gpu in gpus], "of_node": of_node if leads else {}}

    def _try_gpus(
        self, gpus: Sequence[Gpu], workers: Sequence[Worker], says: Sequence[Mapping[str, Any]], limit_s: float
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
        return tuple(gpu._replace(**found[gpu.uuid]) if gpu.uuid in found else gpu for gpu in gpus)

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


def _as_dict(node: CheckedNode) -> dict[str, Any]:
    return {**node._asdict(), "gpus": [gpu._asdict() for gpu in node.gpus]}


def be_checked(word: str, env: Mapping[str, str]) -> int:
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
    sys.exit(be_checked(sys.argv[1], dict(os.environ)))
