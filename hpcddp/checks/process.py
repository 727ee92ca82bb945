"""A process of a launch under check: it looks at itself and its node, calls the checker, and does what that says.

One process of each node looks at the node. Nothing here waits for another node: a process that cannot call the checker
prints why, and ends.
"""

from __future__ import annotations

import _thread
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress

from hpcddp.checks.environment import look_at_machine, run_checks
from hpcddp.checks.node import SHM, CheckedNode, Gpu, Process
from hpcddp.errors import HpcddpError, LaunchError, NoAnswerError, SchedulerError
from hpcddp.ranks.cgroups import list_cgroups
from hpcddp.ranks.device import choose_devices, read_gpus_per_rank, visible_devices
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.network import look_around, settle_interface
from hpcddp.ranks.reach import find_local_address, open_listener
from hpcddp.ranks.rendezvous import LOWEST, ephemeral_range, port_candidates
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.run import run_program
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_CONNECT_S = 3.0
_PROGRAM_S = 10.0  # for nvidia-smi, or the job file's own line
_KILLED_S = 1.0
GPU_S, IMPORT_S = 15.0, 25.0  # for one order to a device; for `import torch`
_REAL_WORKER = (sys.executable, "-m", "hpcddp.checks.device")


# Looking. Each part gives what it can, and leaves the rest unknown.


_BLOCK = 65536
_MB = 1024 * 1024
#: How the variables begin that every rank of a job should have alike.
_ALIKE = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "OMP_NUM", "MKL_", "PYTORCH_", "RCCL_", "HF_", "MASTER_")
_ALIKE_WHOLE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "http_proxy", "https_proxy", "no_proxy", "VIRTUAL_ENV")


def variables_alike(env: Mapping[str, str]) -> dict[str, str]:
    """Choose the variables that should be the same on all ranks; a list of folders has each once, since launchers put
    their own in front again and again."""
    found = {name: env[name] for name in env if name.startswith(_ALIKE) or name in _ALIKE_WHOLE}
    lists = {
        name: ":".join(dict.fromkeys(filter(None, text.split(":"))))
        for name, text in found.items()
        if name.endswith("PATH")
    }
    return found | lists


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


def find_free_memory(path: str = "/proc/meminfo") -> int | None:
    """MiB of memory that a program could have."""
    with suppress(OSError), open(path, encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return None


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


def look_at_gpus(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...], str]:
    """The GPUs, what runs on them, and why the driver does not say it. Nothing where there is no driver."""
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return (), (), ""
    rows = ["nvidia-smi", f"--query-gpu=pci.bus_id,{_SMI}", "--format=csv,noheader,nounits"]
    remapped = ["nvidia-smi", "-q", "-d", "ROW_REMAPPER,PAGE_RETIREMENT"]
    apps = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        answer = run_program(rows, env, patience_s=_PROGRAM_S)
        if answer.status:
            said = (answer.stdout + answer.stderr).strip().splitlines() or [f"status {answer.status}"]
            return (), (), f"nvidia-smi: {said[0]}"
        gpus = read_gpus(answer.stdout, run_program(remapped, env, patience_s=_PROGRAM_S).stdout)
        left = run_program(apps, env, patience_s=_PROGRAM_S).stdout.splitlines()
    except SchedulerError as error:  # it is no scheduler's
        return (), (), error.message
    return gpus, tuple(line.strip() for line in left if line.strip()), ""


def run_line(line: str, env: Mapping[str, str]) -> str:
    """How the job file's own line of shell has failed; empty: it has not."""
    if not line:
        return ""
    try:
        answer = run_program(["sh", "-c", line], env, patience_s=_PROGRAM_S)
    except NoAnswerError:
        return f"the job file's own check did not end in {_PROGRAM_S:.0f} s"
    if not answer.status:
        return ""
    said = (answer.stdout + answer.stderr).strip().splitlines()
    return f"the job file's own check ended with status {answer.status}{f': {said[-1]}' if said else ''}"


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
    host: str, folders: Sequence[str], marks: Sequence[str], line: str, env: Mapping[str, str]
) -> CheckedNode:
    """All that a node can say in a second or two, but for torch, GPUs' speeds and what others see of it. `marks`: files
    that the checker has made in folders that all nodes should see."""
    gpus, apps, smi_error = look_at_gpus(env)
    shm = None
    with suppress(OSError):
        found = os.statvfs(SHM)
        shm = found.f_bavail * found.f_frsize // _MB, found.f_blocks * found.f_frsize // _MB
    disks = {folder: look_at_disk(folder) for folder in folders}
    most = (count_cpus(), _most_files(), shm, find_free_memory())
    unseen = next((mark for mark in marks if not os.path.exists(mark)), "")
    folder = f"{os.path.dirname(unseen)} is another folder here than on the checker's host" if unseen else ""
    errors = {"GPU driver": smi_error, "own check": run_line(line, env), "folder": folder}
    return CheckedNode(host, *most, disks, gpus, apps, errors=errors)


def _most_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


# Names and interfaces as the ranks will use them.


def reach(host: str, port: int, token: bytes, limit_s: float = 5.0) -> dict[str, str]:
    """Why the name of rank 0's host is wrong here, or its port is not reached. `token`: what rank 0 answers."""
    me = os.uname().nodename
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"rank 0's name": f"rank 0's host {host!r} does not resolve: {error.strerror or error}"}
    why = ""
    for family, kind, number, _, where in found:
        with socket.socket(family, kind, number) as connection:
            connection.settimeout(limit_s)
            address = str(where[0])
            try:
                connection.connect(where)
                if connection.recv(len(token)) == token:
                    return {}
                return {"rank 0's name": f"rank 0's host {host!r} is {address} for {me}, and that is another host"}
            except OSError as error:
                if address.startswith("127.") or address == "::1":
                    return {"rank 0's name": f"rank 0's host {host!r} is {address} for {me}: {me} itself"}
                why = f"rank 0 at {host} ({address}), port {port}: {_say(error)}"
    return {"rank 0's port": why}


def _say(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()


# A device, and this process for the checker.


class Worker:
    """A process with one device, and torch. It is killed once it does not answer in time."""

    def __init__(self, env: Mapping[str, str], words: Sequence[str] = _REAL_WORKER) -> None:
        self._errors = open(os.memfd_create("errors"), "w+b")  # noqa: SIM115  # closed with the process
        self._connection, its = socket.socketpair()
        self._answers = self._connection.makefile("rb")
        with its:
            self._process = subprocess.Popen(
                [*words], env=dict(env), stdin=its.fileno(), stdout=its.fileno(), stderr=self._errors
            )

    def read(self, end: float, late: str) -> dict[str, Any]:
        """The next answer, by this time of the monotonic clock; with the key `error` where there is none."""
        self._connection.settimeout(max(end - time.monotonic(), 0.001))
        line = b""
        try:
            line = self._answers.readline()
        except TimeoutError:
            self.close()
            return {"error": late}
        except OSError:  # it has ended with an order that it did not read
            pass
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            return {"error": lines[-1] if lines else f"its process ended with {status}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, limit_s: float, order: Mapping[str, object]) -> dict[str, Any]:
        """Send an order and return the answer."""
        self.tell(order)
        return self.read(time.monotonic() + limit_s, f"it did not answer in {limit_s:.0f} s, and was killed")

    def tell(self, order: Mapping[str, object]) -> None:
        """Give it an order, whose answer is read later."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """End it. A process whose driver hangs does not end, and nobody waits for it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        for stream in (self._answers, self._connection, self._errors):
            stream.close()


def identify_process(env: Mapping[str, str], host: str) -> Process:
    """Find this process's place among the ranks. An error of the launch is a field of it."""
    launch = Launch(env, host, strict=False)
    process = Process(host, cpus=tuple(sorted(os.sched_getaffinity(0))), env=variables_alike(env))
    try:
        info, master = launch.info, launch.rendezvous.master_addr or ""
        found = run_checks(env, info, look_at_machine(env))
    except HpcddpError as error:
        return process._replace(error=str(error))
    place = {name: getattr(info, name) for name in ("rank", "world_size", "local_rank", "local_world_size")}
    return process._replace(**place, master=master, found=tuple(found))


class CheckedProcess:
    """This process, for the checker: each method but those with an underscore is an order."""

    def __init__(self, env: Mapping[str, str], host: str) -> None:
        self._env, self._host = dict(env), host
        self.process = identify_process(env, host)
        self._workers: list[Worker] = []
        self._gpus: tuple[Gpu, ...] = ()
        self._listener: socket.socket | None = None

    def look(self, folders: Sequence[str], marks: Sequence[str], line: str) -> dict[str, Any]:
        """Describe this node, before anything computes on its GPUs."""
        folders = [*folders, self._env.get("TMPDIR") or "/tmp"]  # noqa: S108  # looked at
        node = look_at_node(self._host, folders, marks, line, self._env)
        self._gpus = node.gpus
        return {"node": node._asdict(), "gpus": [gpu._asdict() for gpu in node.gpus]}

    def measure(self, *, fast: bool, leads: bool, patience: float) -> dict[str, Any]:
        """Measure its GPUs and torch, each GPU in a process of its own. `leads`: whether it speaks for its node.
        `fast`: nothing is computed."""
        gpus = self._gpus if leads else look_at_gpus(self._env)[0]
        try:
            self.process = self.process._replace(gpus=taken_gpus(gpus, self._env, self.process))
        except LaunchError as error:
            self.process = self.process._replace(error=self.process.error or str(error))
        errors = {"interface": self._settle_interface("nccl" if gpus else "gloo")}
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
        for worker, said in zip(workers, says, strict=True):
            if said.get("devices"):
                worker.tell({"do": "measure"})
        late = f"it did not answer in {limit_s:.0f} s, and its process was killed"
        end = time.monotonic() + limit_s
        for uuid, worker, said in zip(self.process.gpus, workers, says, strict=False):
            if said.get("devices"):
                found[uuid] = worker.read(end, late)
            else:
                found[uuid] = {"error": said.get("error") or f"torch {said['versions']['torch']} sees no device"}
        return tuple(gpu._replace(**found[gpu.uuid]) if gpu.uuid in found else gpu for gpu in gpus)

    def _settle_interface(self, backend: str) -> str:
        """Take the interface that the ranks will; why the network that they are to use is none of this host's."""
        try:
            find_local_address(self._env, self._host)
            peer = self.process.master if self.process.master not in {"", self._host} else None
            variable, _ = settle_interface(self._env, backend, look_around(self._host, peer, self._env))
            self._env |= dict([variable] if variable is not None else [])
        except LaunchError as error:
            return error.message
        return ""

    def listen(self, token: str) -> dict[str, Any]:
        """Rank 0's side: listen on MASTER_PORT, or a free port of the kind that ranks find for themselves, and give
        everybody who calls the token. The answer: this address, and the port."""
        free = port_candidates(f"{os.getpid()} {time.time()}", 16, ephemeral_range()) or [LOWEST]
        port = read_number(self._env.get("MASTER_PORT", ""))
        wanted = [port] if port and port < 65536 else free
        why = ""
        for one in wanted:
            try:
                self._listener = open_listener(one)
            except OSError as error:
                why = f"rank 0's port {one} cannot be listened on: {os.strerror(error.errno or 0).lower()}"
                continue
            _thread.start_new_thread(_greet, (self._listener, token.encode()))
            return {"host": self._find_address(), "port": one}
        return {"error": why}

    def _find_address(self) -> str:
        with suppress(LaunchError):
            return find_local_address(self._env, self._host)
        return self._host

    def reach(self, host: str, port: int, token: str, limit_s: float) -> dict[str, Any]:
        """The others' side."""
        return {"errors": reach(self.process.master or host, port, token.encode(), limit_s)}

    def device(self, what: str, limit_s: float, **order: object) -> dict[str, Any]:
        """Send an order to the process with torch: its answer, and the address at which others call it."""
        if not self._workers:
            self._workers = [Worker(self._env)]
            self._workers[0].read(time.monotonic() + limit_s, "import torch took too long")
        answer = self._workers[0].ask(limit_s, {"do": what, "limit_s": limit_s, **order})
        if "error" in answer:
            self._workers.pop().close()
        return {"address": self._find_address(), **answer}

    def clock(self) -> dict[str, float]:
        """The time here."""
        return {"time": time.time()}

    def close(self) -> None:
        """End what was started."""
        for worker in self._workers:
            worker.close()


def be_checked(word: str, env: Mapping[str, str]) -> int:
    """Be checked. `word`: the key and the port of the checker, and its addresses. Status 0, whatever is found."""
    key, port, addresses = word.split(":", 2)
    me = os.uname().nodename
    connection = _connect(me, addresses.split(","), int(port))
    if connection is None:
        return 0
    checked = CheckedProcess(env, me)
    try:
        with connection:
            connection.sendall(json.dumps({"key": key, "process": checked.process._asdict()}).encode() + b"\n")
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


def _connect(me: str, hosts: Sequence[str], port: int) -> socket.socket | None:
    """A connection to the first of the addresses that can be reached; None, and why is printed, where none can be."""
    errors = list[str]()
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), _CONNECT_S)
        except OSError as error:
            errors.append(f"hpcddp: {me} does not reach the checker at {host}, port {port}: {_say(error)}\n")
            continue
        connection.settimeout(None)
        return connection
    sys.stderr.writelines(errors)
    return None


if __name__ == "__main__":
    sys.exit(be_checked(sys.argv[1], dict(os.environ)))
