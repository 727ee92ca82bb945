"""A process of a launch under check: it describes itself and its node to the checker, and does what that orders.

One process of each node describes the node. Nothing here waits for another node: a process that cannot call the checker
prints why, and ends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from hpcddp.checks.environment import describe_machine, run_checks
from hpcddp.checks.node import SHM, CheckedNode, Gpu, Process
from hpcddp.errors import HpcddpError, LaunchError, SchedulerError
from hpcddp.ranks.cgroups import list_cgroups
from hpcddp.ranks.device import choose_devices, read_gpus_per_rank, visible_devices
from hpcddp.ranks.gpus import MEMORY_REPORT, NEEDS_RESET
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.network import set_interface
from hpcddp.ranks.reach import find_local_address, open_listener
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import is_loopback
from hpcddp.schedulers.run import run_program
from hpcddp.supervisor import wire
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_CONNECT_S = 3.0
_PROGRAM_S = 10.0  # for nvidia-smi, or the job file's own line
_KILLED_S = 1.0
_DEVICE = (sys.executable, "-m", "hpcddp.checks.device")
GPU_S, IMPORT_S = 15.0, 25.0  # for one order to a device; for `import torch`
_MB = 1024 * 1024
#: How the variables begin that every rank of a job should have alike.
_ALIKE = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "OMP_NUM", "MKL_", "PYTORCH_", "RCCL_", "HF_", "MASTER_")
_ALIKE_WHOLE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "http_proxy", "https_proxy", "no_proxy", "VIRTUAL_ENV")
_SMI = "pci.bus_id,uuid,name,driver_version,memory.used,ecc.errors.uncorrected.volatile.total"


class Peer:
    """The other end of a connection. It answers one order after the other; once it was late or has gone, it is asked
    nothing more."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_gone = False
        self._incoming = wire.Incoming()
        self._received: list[wire.Message] = []
        self._lock = threading.Lock()

    def send(self, content: Mapping[str, object]) -> None:
        """Send an order, or an answer. OSError if the other end has gone."""
        self.connection.sendall(wire.write(wire.Content(json.dumps(content))))

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """Receive an order, or an answer. TimeoutError where it is late, EOFError or OSError where nothing comes."""
        end = time.monotonic() + (limit_s or 0)
        while not self._received:
            self.connection.settimeout(None if limit_s is None else max(end - time.monotonic(), 0.001))
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += self._incoming.add(data)
        message = self._received.pop(0)
        if not isinstance(message, wire.Content):
            raise EOFError
        content: dict[str, Any] = json.loads(message.text)
        return content

    def ask(self, order: Mapping[str, object], limit_s: float) -> dict[str, Any] | None:
        """The answer to an order; None if there is none in this time."""
        with self._lock:
            if not self.is_gone:
                try:
                    self.send(order)
                    return self.receive(limit_s)
                except (OSError, EOFError, ValueError):
                    self.is_gone = True
            return None


class Worker:
    """A process with one device, and torch. It is killed once it does not answer in time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._errors = open(os.memfd_create("errors"), "w+b")  # noqa: SIM115  # closed with the process
        connection, its = socket.socketpair()
        self._peer = Peer(connection)
        with its:
            words, output = [*_DEVICE, str(its.fileno())], self._errors
            self._process = subprocess.Popen(
                words, env=dict(env), stdout=output, stderr=output, pass_fds=[its.fileno()]
            )

    def send(self, order: Mapping[str, object]) -> None:
        """Send an order, whose answer is received later."""
        with suppress(OSError):  # it has ended: there will be no answer
            self._peer.send(order)

    def receive(self, end: float, late: str) -> dict[str, Any]:
        """The next answer, by this time of the monotonic clock; with the key `error` where there is none."""
        try:
            return self._peer.receive(max(end - time.monotonic(), 0.001))
        except TimeoutError:
            self.close()
            return {"error": late}
        except (OSError, EOFError):
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            return {"error": lines[-1] if lines else f"its process ended with {status}"}

    def close(self) -> None:
        """End it. A process whose driver hangs does not end, and nobody waits for it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        self._peer.connection.close()
        self._errors.close()


# ---- the node: each part gives what it can, and leaves the rest unknown


def choose_common_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Choose the variables that should be the same on all ranks; a list of folders has each once, since launchers put
    their own in front again and again."""
    found = {name: env[name] for name in env if name.startswith(_ALIKE) or name in _ALIKE_WHOLE}
    return {
        name: ":".join(dict.fromkeys(filter(None, text.split(":")))) if name.endswith("PATH") else text
        for name, text in found.items()
    }


def count_cpus(**tree: str) -> float:
    """How many CPUs this process may use at once: those of its affinity, and no more than the quota of its control
    group or of one above it. `tree`: of `list_cgroups`."""
    most = float(len(os.sched_getaffinity(0)))
    for version, folder in list_cgroups("cpu", **tree):
        with suppress(OSError, ValueError):
            names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = " ".join(_read(os.path.join(folder, name)) for name in names).split()
            most = min(most, int(quota) / int(period)) if int(quota) > 0 else most  # "max": none
    return round(most, 2)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def probe_disk(folder: str) -> tuple[int, int, str]:
    """MiB and files that this user may still write there, -1 files where the file system counts none, and why a small
    file cannot be written. A quota shows by writing alone."""
    path = os.path.join(folder, f".hpcddp-check-{os.uname().nodename}-{os.getpid()}")
    error = ""
    try:
        with open(path, "xb") as file:
            file.write(bytes(_MB))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        error = problem.strerror or str(problem)
    with suppress(OSError):
        os.unlink(path)
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, -1, error
    return found.f_bavail * found.f_frsize // _MB, found.f_favail if found.f_files else -1, error


def read_gpus(rows: str, memory: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's answers: a line of CSV each, and the report on their memory."""
    pending = {part.split("\n")[0].strip() for part in memory.split("\nGPU ")[1:] if re.search(NEEDS_RESET, part)}
    gpus = []
    for line in rows.splitlines():
        bus, uuid, name, driver, used, errors = (field.strip() for field in line.split(","))
        gpus.append(Gpu(uuid, name, driver, read_number(used) or 0, read_number(errors) or 0, bus in pending))
    return tuple(gpus)


def query_gpus(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...], str]:
    """The GPUs, what runs on them, and why the driver does not say it. Nothing where there is no driver."""
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return (), (), ""
    rows = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
    apps = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        answer = run_program(rows, env, patience_s=_PROGRAM_S)
        if answer.status:
            return (), (), f"nvidia-smi: {(answer.stdout + answer.stderr).strip() or answer.status}".splitlines()[0]
        gpus = read_gpus(answer.stdout, run_program([*MEMORY_REPORT], env, patience_s=_PROGRAM_S).stdout)
        left = run_program(apps, env, patience_s=_PROGRAM_S).stdout.splitlines()
    except SchedulerError as error:  # it is no scheduler's
        return (), (), error.message
    except ValueError:
        return (), (), f"nvidia-smi answered {answer.stdout[:80]!r}"
    return gpus, tuple(line.strip() for line in left if line.strip()), ""


def run_line(line: str, env: Mapping[str, str]) -> str:
    """How the job file's own line of shell has failed; empty: it has not."""
    try:
        answer = run_program(["sh", "-c", line], env, patience_s=_PROGRAM_S)
    except SchedulerError:
        return f"the job file's own check did not end in {_PROGRAM_S:.0f} s"
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    why = f": {lines[-1]}" if lines else ""
    return f"the job file's own check ended with status {answer.status}{why}" if answer.status else ""


def choose_gpus(gpus: Sequence[Gpu], env: Mapping[str, str], process: Process) -> tuple[str, ...]:
    """The unique names of the GPUs that this process would take, as training does; all for one that is alone on its
    node. LaunchError where it could take none."""
    mask = visible_devices(env)
    names = [gpu.uuid for gpu in gpus]
    if mask is not None and names:
        by_number = dict(zip(map(str, range(len(names))), names, strict=True))
        names = [by_number.get(entry, entry) for entry in mask]
    if not names or process.local_world_size in {None, 1}:
        return tuple(names)
    chosen = choose_devices(len(names), process.local_rank, process.local_world_size, read_gpus_per_rank(env))
    return tuple(names[at] for at in chosen)


def describe_node(host: str, folder: str, mark: str, line: str, env: Mapping[str, str]) -> CheckedNode:
    """All that a node can say in a second or two, but for torch, GPUs' speeds and what others see of it. `mark`: a file
    that the checker has made in the job's folder, which all nodes should see; "": it could not."""
    gpus, apps, smi_error = query_gpus(env)
    shm = None
    with suppress(OSError):
        found = os.statvfs(SHM)
        shm = found.f_bavail * found.f_frsize // _MB, found.f_blocks * found.f_frsize // _MB
    disks = {each: probe_disk(each) for each in (folder, env.get("TMPDIR") or "/tmp")}  # noqa: S108  # looked at
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    errors = {"GPU driver": smi_error, "own check": run_line(line, env) if line else ""}
    if mark and not os.path.exists(mark):
        errors["folder"] = f"{folder} is another folder here than on the checker's host"
    most_files = None if files == resource.RLIM_INFINITY else files
    return CheckedNode(host, count_cpus(), most_files, shm, disks, gpus, apps, errors=errors)


def reach(host: str, port: int, limit_s: float = 5.0) -> dict[str, str]:
    """Why the name of rank 0's host is wrong on another host, or why its port is not reached."""
    me = os.uname().nodename
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return {"rank 0's name": f"rank 0's host {host!r} does not resolve: {error.strerror or error}"}
    if is_loopback(address):
        return {"rank 0's name": f"rank 0's host {host!r} is {address} for {me}: {me} itself"}
    try:
        socket.create_connection((host, port), limit_s).close()
    except OSError as error:
        return {"rank 0's port": f"rank 0 at {host} ({address}), port {port}: {_describe(error)}"}
    return {}


def _describe(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()


def identify_process(env: Mapping[str, str], host: str) -> Process:
    """Find this process's place among the ranks. An error of the launch is a field of it."""
    launch = Launch(env, host, strict=False)
    process = Process(host, cpus=tuple(sorted(os.sched_getaffinity(0))), env=choose_common_variables(env))
    try:
        info, master = launch.info, launch.rendezvous.master_addr or ""
    except HpcddpError as error:
        return process._replace(error=str(error))
    found = run_checks(env, info, describe_machine())
    place = {name: getattr(info, name) for name in ("rank", "world_size", "local_rank", "local_world_size")}
    return process._replace(**place, master=master, found=tuple(found))


class CheckedProcess:
    """The process under check, for the checker: each method but those with an underscore is an order."""

    def __init__(self, env: Mapping[str, str], host: str) -> None:
        self._env, self._host = dict(env), host
        self.process = identify_process(env, host)
        self._workers: list[Worker] = []
        self._gpus: tuple[Gpu, ...] = ()
        self._listener: socket.socket | None = None

    def describe(self, folder: str, mark: str, line: str) -> dict[str, Any]:
        """Describe this node, before anything computes on its GPUs."""
        node = describe_node(self._host, folder, mark, line, self._env)
        self._gpus = node.gpus
        return {"node": node._asdict(), "gpus": [gpu._asdict() for gpu in node.gpus]}

    def measure(self, *, fast: bool, leads: bool, patience: float) -> dict[str, Any]:
        """Measure its GPUs and torch, each GPU in a process of its own. `leads`: whether it speaks for its node.
        `fast`: nothing is computed."""
        gpus = self._gpus if leads else query_gpus(self._env)[0]
        errors = dict[str, str]()
        try:
            self.process = self.process._replace(gpus=choose_gpus(gpus, self._env, self.process))
        except LaunchError as error:
            self.process = self.process._replace(error=self.process.error or str(error))
        try:
            find_local_address(self._env, self._host)
            peer = self.process.master if self.process.master not in {"", self._host} else None
            set_interface(self._env, "nccl" if gpus else "gloo", self._host, peer)
        except LaunchError as error:
            errors["interface"] = error.message
        devices = [{**self._env, "CUDA_VISIBLE_DEVICES": uuid} for uuid in self.process.gpus]
        limit_s = IMPORT_S * patience
        workers = [] if fast else [Worker(env) for env in devices or [self._env][: int(leads)]]
        end = time.monotonic() + limit_s
        says = [worker.receive(end, f"import torch took more than {limit_s:.0f} s") for worker in workers]
        if workers and self.process.gpus:
            gpus = self._try_gpus(gpus, workers, says, GPU_S * patience)
        for worker in workers[1:]:
            worker.close()
        self._workers = workers[:1]
        torch = next((one for one in says if "versions" in one), says[0] if says else {})
        if "error" in torch:
            errors["torch"] = f"torch cannot be imported: {torch['error']}"
        driver = {"driver": gpus[0].driver} if gpus and says else {}
        found = {"versions": {**torch.get("versions", {}), **driver}, "errors": errors}
        process = self.process._asdict()
        return {"process": process, "gpus": [gpu._asdict() for gpu in gpus], **(found if leads else {})}

    def _try_gpus(
        self, gpus: Sequence[Gpu], workers: Sequence[Worker], says: Sequence[Mapping[str, Any]], limit_s: float
    ) -> tuple[Gpu, ...]:
        """The GPUs, those of this process with what they have measured, all side by side."""
        found: dict[str, Mapping[str, Any]] = {}
        late = f"it did not answer in {limit_s:.0f} s, and its process was killed"
        end = time.monotonic() + limit_s
        for worker in workers:
            worker.send({"do": "measure"})
        for uuid, worker, answer in zip(self.process.gpus, workers, says, strict=True):
            found[uuid] = {"error": answer["error"]} if "error" in answer else worker.receive(end, late)
        return tuple(gpu._replace(**found.get(gpu.uuid, {})) for gpu in gpus)

    def listen(self) -> dict[str, Any]:
        """Rank 0's side: listen on MASTER_PORT, or a free port. The answer: this address, and the port."""
        given = read_number(self._env.get("MASTER_PORT", "")) or 0
        try:
            self._listener = open_listener(given)
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            return {"error": f"rank 0's port {given} cannot be listened on: {why}"}
        return {"host": self._find_address(), "port": self._listener.getsockname()[1]}

    def _find_address(self) -> str:
        with suppress(LaunchError):
            return find_local_address(self._env, self._host)
        return self._host

    def reach(self, host: str, port: int, limit_s: float) -> dict[str, Any]:
        """The other ranks' side: call rank 0's port."""
        return {"errors": reach(self.process.master or host, port, limit_s)}

    def device(self, what: str, limit_s: float, **order: object) -> dict[str, Any]:
        """Send an order to the process with torch: its answer, and the address at which others call it."""
        end = time.monotonic() + limit_s
        if not self._workers:
            self._workers = [Worker(self._env)]
            self._workers[0].receive(end, "import torch took too long")
        self._workers[0].send({"do": what, "limit_s": limit_s, **order})
        answer = self._workers[0].receive(end, f"it did not answer in {limit_s:.0f} s, and was killed")
        if "error" in answer:
            self._workers.pop().close()
        return {"address": self._find_address(), **answer}

    def clock(self) -> dict[str, float]:
        return {"time": time.time()}

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def answer_checker(word: str, env: Mapping[str, str]) -> None:
    """Be checked. `word`: the key and the port of the checker, and its addresses."""
    key, port, addresses = word.split(":", 2)
    me, errors = os.uname().nodename, list[str]()
    for host in addresses.split(","):
        try:
            checker = Peer(socket.create_connection((host, int(port)), _CONNECT_S))
            break
        except OSError as error:
            errors.append(f"hpcddp: {me} does not reach the checker at {host}, port {port}: {_describe(error)}\n")
    else:
        sys.stderr.writelines(errors)
        return
    checked = CheckedProcess(env, me)
    with suppress(OSError, EOFError):  # the checker has ended
        checker.send({"key": key, "process": checked.process._asdict()})
        while True:
            order = checker.receive()
            checker.send(getattr(checked, order.pop("do"))(**order))
    checked.close()


if __name__ == "__main__":
    answer_checker(sys.argv[1], dict(os.environ))
