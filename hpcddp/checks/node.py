"""Descriptions of one node and of the processes on it, and the checks of them, one small function each.

A check compares a node's values with those of the job's other nodes, and asks nothing itself.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from hpcddp.checks.environment import FAILED, WARNING, Check
from hpcddp.ranks.gpus import find_gpu_type
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Found = tuple[str, str] | None


SHM = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written
_LEAST_SHM_MB, _SMALL_SHM_MB, _LEAST_FILES = 16, 512, 1024
_LEAST_DISK_MB, _LEAST_INODES = 1024, 1000  # with less a folder of a job is taken to be full
_MOST_CLOCK_S = 1.0
_LEFT_MB = 1024  # of a GPU's memory, that no process of this check holds
_OF_MEDIAN = 1 / 2
_OF_DATA_SHEET, _OF_GPUS = 0.4, 0.7  # the floor of a type; of the median of the job's


# ---- descriptions: what is None is not known, and not checked


class Gpu(Record):
    """A GPU as its driver shows it. `uncorrected`: errors of its memory since the driver was started. `is_pending`:
    a row or page of its memory waits for a reset. `tflops`, `copy_gbs`: a matrix product in 16 bits, a copy in its
    memory. `error`: why it could not be tried."""

    uuid: str
    name: str = ""
    driver: str = ""
    used_mb: int = 0
    uncorrected: int = 0
    is_pending: bool = False
    tflops: float | None = None
    copy_gbs: float | None = None
    error: str = ""


class Process(Record):
    """A process of a launch, the place that its launcher gave it, and what it would take. `error`: why it has no
    place. `master`: where it will look for rank 0. `gpus`: those that it takes, by their unique names. `found`: by the
    checks of its environment, a Check's fields each."""

    host: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    error: str = ""
    master: str = ""
    cpus: Sequence[int] = ()
    gpus: Sequence[str] = ()
    env: Mapping[str, str] = {}
    found: Sequence[Sequence[str]] = ()


class CheckedNode(Record):
    """A node. `cpus`: how many its processes may use at once, by affinity and control group. `shm_mb`: free, and in
    all. `disks`: a folder -> MiB and files that may still be written, and why a small one could not be. `clock_s`: how
    far its clock is before the checker's, at least. `errors`: what it finds wrong itself, by the names of ERRORS."""

    host: str
    cpus: float | None = None
    files: int | None = None
    shm_mb: tuple[int, int] | None = None
    disks: Mapping[str, tuple[int, int, str]] = {}
    gpus: tuple[Gpu, ...] = ()
    leftover: Sequence[str] = ()
    versions: Mapping[str, str] = {}
    clock_s: float | None = None
    errors: Mapping[str, str] = {}


class CheckedJob:
    """All that has answered, with medians over nodes and GPUs, and what most nodes and ranks have."""

    def __init__(self, nodes: Sequence[CheckedNode], processes: Sequence[Process], gpus_per_node: int = 0) -> None:
        self.nodes, self.gpus_per_node = nodes, gpus_per_node
        self.ranks: dict[str, list[Process]] = {node.host: [] for node in nodes}
        for process in processes:
            self.ranks.setdefault(process.host, []).append(process)
        gpus = [gpu for node in nodes for gpu in node.gpus]
        self.usual_cpus = _median(node.cpus for node in nodes)
        self.medians = {name: _median(getattr(gpu, name) for gpu in gpus) for name in ("tflops", "copy_gbs")}
        self.versions: dict[str, Counter[str]] = {}
        for node in nodes:
            for what, version in node.versions.items():
                self.versions.setdefault(what, Counter())[version] += 1
        names = sorted({name for process in processes for name in process.env})
        self.env = {name: Counter(one.env.get(name) for one in processes).most_common(1)[0][0] for name in names}


def _median(values: Iterable[float | None]) -> float:
    """The median where several are known, else 0."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) > 1 else 0.0


# ---- checks: each gives (what is so, what to do), or None where all is well or nothing is known


def check_cpus(node: CheckedNode, job: CheckedJob) -> Found:
    """A node whose processes may use far fewer CPUs than on the others: by affinity, or a control group's quota."""
    if node.cpus is None or node.cpus >= job.usual_cpus * _OF_MEDIAN:
        return None
    message = f"its processes may use {node.cpus:g} CPUs, and {job.usual_cpus:g} on the job's other nodes"
    return message, "look for another job's control group or a limit there: cat /sys/fs/cgroup/cpu.max; taskset -p $$"


def check_oversubscribed(node: CheckedNode, job: CheckedJob) -> Found:
    """More ranks than CPUs that they may use: on the node, or among those that are bound to the same CPUs."""
    bound = Counter(tuple(process.cpus) for process in job.ranks[node.host] if process.cpus)
    groups = [(len(job.ranks[node.host]), node.cpus), *((ranks, len(cpus)) for cpus, ranks in bound.items())]
    for ranks, cpus in groups:
        if cpus is not None and ranks > max(cpus, 1):
            unbound = "".join(f"; {row.name}: {row.unbound}" for row in LAUNCHERS.values() if row.unbound)
            remedy = f"fewer --ranks-per-node, or CPUs of its own for each rank (--cpus-per-rank{unbound})"
            return f"{ranks} ranks may use {cpus:g} CPUs together", remedy
    return None


def check_small_shm(node: CheckedNode, _job: CheckedJob) -> Found:
    """A small /dev/shm: loader processes hand batches over in it, and die by SIGBUS."""
    if node.shm_mb is None or node.shm_mb[1] >= _SMALL_SHM_MB:
        return None
    return f"{SHM} has {node.shm_mb[1]} MiB", f"in a container: --shm-size=8g, or --bind {SHM}"


def check_full_shm(node: CheckedNode, _job: CheckedJob) -> Found:
    """A full /dev/shm: what an earlier job has left there keeps NCCL from starting."""
    if node.shm_mb is None or node.shm_mb[0] >= min(_LEAST_SHM_MB, node.shm_mb[1]):
        return None
    return f"{SHM} has room for {node.shm_mb[0]} of {node.shm_mb[1]} MiB", f"remove what lies there: ls -l {SHM}"


def check_files(node: CheckedNode, _job: CheckedJob) -> Found:
    """Too few open files for ranks with loader processes."""
    if node.files is None or node.files >= _LEAST_FILES:
        return None
    return f"a process may open {node.files} files", f"ulimit -n {_LEAST_FILES}, before the job's command"


def check_disk(node: CheckedNode, _job: CheckedJob) -> Found:
    """A folder of the job that is full, that its quota has used up, or that cannot be written."""
    return next(filter(None, (judge_disk(folder, *disk) for folder, disk in node.disks.items())), None)


def judge_disk(folder: str, free_mb: int, files: int, error: str) -> Found:
    """Judge a folder by the answer of `probe_disk`."""
    if error:
        return f"nothing can be written to {folder}: {error}", f"df -h {folder}; df -i {folder}; your quota"
    if free_mb < _LEAST_DISK_MB:
        return f"{folder} has {free_mb} MiB left", f"remove what is not needed: du -sh {folder}/*"
    if 0 <= files < _LEAST_INODES:
        return f"{folder} has room for {files} more files", f"find {folder} -type f | wc -l"
    return None


def check_leftover(node: CheckedNode, _job: CheckedJob) -> Found:
    """Processes of an earlier job that still hold a GPU, or a GPU's memory that no visible process holds."""
    held = [gpu for gpu in node.gpus if gpu.used_mb > _LEFT_MB]
    if not node.leftover and not held:
        return None
    who = f"{', '.join(node.leftover[:4])} still runs on its GPUs" if node.leftover else ""
    memory = f"{held[0].used_mb} MiB of GPU {held[0].uuid} are in use" if held else ""
    return "; ".join(filter(None, (who, memory))), f"end it, or tell the site: nvidia-smi on {node.host}"


def check_gpu_count(node: CheckedNode, job: CheckedJob) -> Found:
    """Fewer GPUs than the job has on each node."""
    if len(node.gpus) >= job.gpus_per_node or node.errors.get("GPU driver"):
        return None
    message = f"it shows {format_count(len(node.gpus), 'GPU')} of {job.gpus_per_node}"
    return message, f"nvidia-smi -L on {node.host}; tell the site"


def check_gpu_memory(node: CheckedNode, _job: CheckedJob) -> Found:
    """A GPU whose memory has had uncorrectable errors, or waits for a reset to take a row or page out of use."""
    for gpu in node.gpus:
        if gpu.is_pending:
            return f"GPU {gpu.uuid} needs a reset: a row of its memory is to be replaced", "tell the site"
        if gpu.uncorrected:
            message = f"GPU {gpu.uuid} has counted {format_count(gpu.uncorrected, 'uncorrectable error')} of its memory"
            return message, "leave the node out; tell the site"
    return None


def check_gpu_answer(node: CheckedNode, _job: CheckedJob) -> Found:
    """A GPU that computes nothing: it hangs, or its driver is too old for this torch."""
    ill = [gpu for gpu in node.gpus if gpu.error]
    if not ill:
        return None
    message = f"GPU {ill[0].uuid}: {ill[0].error}"
    return message, f"nvidia-smi on {node.host}; a torch for its driver: https://pytorch.org/get-started"


def check_gpu_speed(node: CheckedNode, job: CheckedJob) -> Found:
    """A GPU below the floor of its type, 0.4 of its data sheet, or below 0.7 of the median of the job's."""
    for gpu in node.gpus:
        row = find_gpu_type(gpu.name)
        for name, what, unit, of_sheet in (
            ("tflops", "multiplies at", "TFLOPS", row.tflops if row is not None else 0),
            ("copy_gbs", "copies at", "GB/s", row.gbs if row is not None else 0),
        ):
            value, usual = getattr(gpu, name), job.medians[name]
            if value is not None and (value < of_sheet * _OF_DATA_SHEET or value < usual * _OF_GPUS):
                message = f"GPU {gpu.uuid} {what} {value:.0f} {unit}"
                others = f"; the job's median is {usual:.0f}" if usual else ""
                others += f"; the data sheet of {row.part} says {of_sheet}" if row is not None else ""
                return message + others, "leave the node out; tell the site"
    return None


def check_shared_gpu(node: CheckedNode, job: CheckedJob) -> Found:
    """Two ranks that would take one GPU, which NCCL refuses."""
    owner: dict[str, int | None] = {}
    for process in job.ranks[node.host]:
        for uuid in process.gpus:
            if uuid in owner:
                message = f"ranks {owner[uuid]} and {process.rank} would both take GPU {uuid}"
                return message, "give each rank its own: --gpus-per-node with ranks per node alike, no --gpus-per-task"
            owner[uuid] = process.rank
    return None


def check_versions(node: CheckedNode, job: CheckedJob) -> Found:
    """Another Python, torch, CUDA, NCCL, driver or hpcddp than on most nodes."""
    for what, counts in job.versions.items():
        usual, count = counts.most_common(1)[0]
        if node.versions.get(what, usual) != usual:
            message = f"{what} is {node.versions[what]}, and {usual} on {count} of {counts.total()} nodes"
            return message, "one environment in a folder that all nodes see, activated in the job's script"
    return None


def check_variables(node: CheckedNode, job: CheckedJob) -> Found:
    """Variables that have another value on this node than on most: a launcher forwards not all, profiles differ."""
    differing = list[str]()
    for name, usual in job.env.items():
        other = next((one for one in (p.env.get(name) for p in job.ranks[node.host]) if one != usual), usual)
        differing += [f"{name} is {_quote(other)}, and {_quote(usual)} in most ranks"] if other != usual else []
    return ("; ".join(differing[:4]), "env: {NAME: …} in the job file, which every rank gets") if differing else None


def check_clock(node: CheckedNode, _job: CheckedJob) -> Found:
    """A clock that differs: logs mislead, certificates and time limits fail."""
    if node.clock_s is None or abs(node.clock_s) < _MOST_CLOCK_S:
        return None
    message = f"its clock is {abs(node.clock_s):.1f} s {'ahead of' if node.clock_s > 0 else 'behind'} the first host's"
    return message, "tell the site: chronyc tracking"


class NodeCheck(Record):
    """A check of a node. `state`: what it makes of the node."""

    name: str
    find: Callable[[CheckedNode, CheckedJob], Found]
    state: str = FAILED


NODE_CHECKS = (
    NodeCheck("GPU count", check_gpu_count),
    NodeCheck("GPU memory", check_gpu_memory),
    NodeCheck("GPU answer", check_gpu_answer),
    NodeCheck("GPU speed", check_gpu_speed),
    NodeCheck("shared GPU", check_shared_gpu),
    NodeCheck("leftover processes", check_leftover),
    NodeCheck("CPUs", check_cpus),
    NodeCheck("oversubscribed CPUs", check_oversubscribed, WARNING),
    NodeCheck("full shared memory", check_full_shm),
    NodeCheck("small shared memory", check_small_shm, WARNING),
    NodeCheck("open files", check_files),
    NodeCheck("disk", check_disk),
    NodeCheck("versions", check_versions),
    NodeCheck("environment", check_variables, WARNING),
    NodeCheck("clock", check_clock, WARNING),
)


#: What a node finds wrong by itself -> what that is, and what to do.
ERRORS = {
    "GPU driver": ("A driver that does not say which GPUs there are", "nvidia-smi on {host}; tell the site"),
    "torch": ("A Python that does not import torch there", "import it on {host}: is its folder seen there?"),
    "interface": (
        "An interface that a variable or the site names, and that this node does not have",
        "ip -brief address on {host}; correct the variable, or unset it",
    ),
    "rank 0's name": (
        "The name of rank 0's host, which does not resolve there, or whose port is not reached",
        "give all ranks MASTER_ADDR=<an address of rank 0>",
    ),
    "port in use": (
        "Rank 0's port, which another process there has",
        "export another MASTER_PORT; ss -ltnp on {host} shows who has it",
    ),
    "rank 0's port": (
        "Rank 0's port, which this node does not reach",
        "open the ports between nodes, or name the network: rendezvous: {{interface: …}} of the site",
    ),
    "folder": ("A folder of the job that is another one there", "cd to a folder that all nodes see; df . on {host}"),
    "own check": ("The job file's own line of shell, with another status than 0", "run it on {host}"),
}


def judge_nodes(job: CheckedJob) -> Iterator[tuple[str, Check]]:
    """Every finding with its host, in the order of nodes and rows; each of the ranks' environments once."""
    for node in job.nodes:
        for row in NODE_CHECKS:
            found = row.find(node, job)
            if found is not None:
                yield node.host, Check(row.name, *found, row.state)
        for name, message in node.errors.items():
            if message:
                yield node.host, Check(name, message, ERRORS[name][1].format(host=node.host), FAILED)
        for finding in dict.fromkeys(tuple(one) for process in job.ranks[node.host] for one in process.found):
            yield node.host, Check(*finding)


def judge_ranks(processes: Sequence[Process], hosts: Sequence[str]) -> Iterator[tuple[str, Check]]:
    """Check the launch as a whole: hosts without a process, ranks that are missing or there twice."""
    name, remedy = "ranks", "start the ranks with the job's launcher; hpcddp env in a rank"
    for process in processes:
        if process.error:
            yield process.host, Check(name, *process.error.partition("\nhint: ")[::2], FAILED)
    placed = [process for process in processes if process.rank is not None]
    lost = [process for process in processes if process.rank is None and not process.error]
    if lost and len(processes) > 1:
        message = f"{len(lost)} of {len(processes)} processes have no rank: no variable of a launcher reaches them"
        yield "", Check(name, message, remedy, FAILED)
    size = max((process.world_size or 0 for process in placed), default=0)
    there: dict[int | None, list[str]] = {}
    for process in placed:
        there.setdefault(process.rank, []).append(process.host)
    for rank, at in there.items():
        if len(at) > 1:
            yield at[-1], Check(name, f"rank {rank} is on {' and '.join(at)}", remedy, FAILED)
    missing = [rank for rank in range(size) if rank not in there]
    if missing and all(any(process.host == host for process in processes) for host in hosts):
        named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        message = f"{'rank' if len(missing) == 1 else 'ranks'} {named} of {size} did not come"
        came = Counter(process.host for process in placed)
        wanted = {process.host: process.local_world_size or 0 for process in placed}
        few = [host for host in came if came[host] < wanted[host]]
        for host in few:
            yield host, Check(name, f"{message}: it has {came[host]} of its {wanted[host]}", remedy, FAILED)
        if not few:  # the launcher does not say how many each host has
            yield "", Check(name, message, remedy, FAILED)


def _quote(value: str | None) -> str:
    return "not set" if value is None else repr(value if len(value) < 80 else f"{value[:77]}…")
