"""The checks of one rank's environment. Each gives a Check, or None where all is well or cannot be known."""

from __future__ import annotations

from hpcddp.checks.check import Check, Machine
from hpcddp.ranks.nodelist import expand_counts
from hpcddp.ranks.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.rankinfo import RankInfo
    from hpcddp.ranks.rendezvous import Rendezvous

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def run_checks(env: Mapping[str, str], info: RankInfo, meeting: Rendezvous, machine: Machine) -> list[Check]:
    """Every finding, in a fixed order."""
    found = (
        check_agents_per_node(env, info),
        check_srun_cpus(env, info, machine),
        check_threads(env, info, machine),
        check_gpu_cgroups(env, info),
        check_memlock(machine),
        check_nccl_interface(env, machine),
        check_nccl_plugin(env, machine),
        check_proxy(env, info, meeting),
    )
    return [check for check in found if check is not None]


def check_agents_per_node(env: Mapping[str, str], info: RankInfo) -> Check | None:
    """torchrun starts all ranks of a node by itself: one torchrun per node, not one per task."""
    if info.launcher != "torchrun":
        return None
    for outer, variable, text in (
        ("srun", "SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_STEP_TASKS_PER_NODE", "")),
        ("mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE", env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")),
        ("mpiexec", "MPI_LOCALNRANKS", env.get("MPI_LOCALNRANKS", "")),
    ):
        started = max(_counts(text), default=1)
        if started > 1:
            each = info.local_world_size or 1
            message = f"{outer} started torchrun {started} times on a node ({variable}={text}), each with {each} ranks"
            return Check(
                "one torchrun per node", message, f"start it once per node, or start the ranks by {outer} alone"
            )
    return None


def check_srun_cpus(env: Mapping[str, str], info: RankInfo, machine: Machine) -> Check | None:
    """Since 22.05 srun does not take sbatch's --cpus-per-task over (Slurm's RELEASE_NOTES for 22.05)."""
    asked = _number(env.get("SLURM_CPUS_PER_TASK", ""))
    if info.launcher != "srun" or asked is None or machine.cpus is None or machine.cpus >= asked:
        return None
    if env.get("SRUN_CPUS_PER_TASK"):
        return None
    message = f"the job has {asked} CPUs per task (SLURM_CPUS_PER_TASK), but this rank may use {machine.cpus}"
    return Check("CPUs of srun's tasks", message, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun")


def check_threads(env: Mapping[str, str], info: RankInfo, machine: Machine) -> Check | None:
    """PBS sets OMP_NUM_THREADS to all CPUs of the chunk, for each of its ranks (OpenPBS, start_exec.c)."""
    threads = _number(env.get("OMP_NUM_THREADS", "").partition(",")[0])
    ranks = info.local_world_size or 1
    if threads is None or machine.cores is None or threads * ranks <= machine.cores or ranks == 1:
        return None
    message = f"OMP_NUM_THREADS={threads} times {ranks} ranks on this node is more than its {machine.cores} CPUs"
    return Check("threads", message, f"export OMP_NUM_THREADS={max(1, machine.cores // ranks)}")


def check_gpu_cgroups(env: Mapping[str, str], info: RankInfo) -> Check | None:
    """--gpus-per-task gives each task a cgroup with its GPU alone: no peer-to-peer copies between the ranks of a node
    (NVIDIA/nccl#1066)."""
    mask, on_node = env.get("CUDA_VISIBLE_DEVICES", ""), _number(env.get("SLURM_GPUS_ON_NODE", "")) or 0
    asked = "SLURM_GPUS_PER_TASK" in env or "per_task" in env.get("SLURMD_TRES_BIND", "")  # srun's own option: 22.05
    if not asked or "," in mask or not mask:
        return None
    if on_node < 2 or (info.local_world_size or 1) < 2:
        return None
    message = f"--gpus-per-task shows this rank 1 of {on_node} GPUs, which can keep ranks from copying GPU to GPU"
    return Check("GPUs of a node", message, "ask with --gpus-per-node, or add --gres-flags=allow-task-sharing")


def check_memlock(machine: Machine) -> Check | None:
    """InfiniBand registers memory, which a limit of locked memory stops (`ibv_reg_mr: Cannot allocate memory`)."""
    if not machine.infiniband or machine.memlock is None or machine.memlock < 0:
        return None
    message = f"this host has InfiniBand, and processes may lock {machine.memlock // 1024} KiB of memory only"
    return Check("locked memory", message, "ulimit -l unlimited; ask the site for memlock in limits.conf")


def check_nccl_interface(env: Mapping[str, str], machine: Machine) -> Check | None:
    """NCCL_SOCKET_IFNAME has to leave an interface: names are prefixes, `=` makes them whole, `^` excludes."""
    value = env.get("NCCL_SOCKET_IFNAME", "")
    if not value or machine.interfaces is None:
        return None
    excludes, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = value.lstrip("^=").split(",")
    for name in machine.interfaces:
        if any(name == word if exact else name.startswith(word) for word in words) != excludes:
            return None
    message = f"NCCL_SOCKET_IFNAME={value} leaves no interface of this host, which has {', '.join(machine.interfaces)}"
    return Check("NCCL's interface", message, "correct it, or unset NCCL_SOCKET_IFNAME")


def check_nccl_plugin(env: Mapping[str, str], machine: Machine) -> Check | None:
    """NCCL_NET names a network; all but NCCL's own two come with a plugin (NCCL's docs/env: NCCL_NET, NCCL_NET_PLUGIN).

    A plugin that NCCL_NET_PLUGIN gives by its path is not looked for here.
    """
    network, plugin = env.get("NCCL_NET", ""), env.get("NCCL_NET_PLUGIN", "")
    if network in {"", "IB", "Socket"} or "/" in plugin or machine.nccl_plugins is None or machine.nccl_plugins:
        return None
    message = f"NCCL_NET={network!r} needs a network plugin, and LD_LIBRARY_PATH leads to no libnccl-net*.so"
    return Check("NCCL's plugin", message, "load the site's plugin module, or put its folder on LD_LIBRARY_PATH")


def check_proxy(env: Mapping[str, str], info: RankInfo, meeting: Rendezvous) -> Check | None:
    """gRPC and HTTP go through a proxy (jax-ml/jax#9582), torch's store does not."""
    proxies = [name for low in _PROXIES for name in (low, low.upper()) if env.get(name)]
    host = meeting.master_addr
    if not proxies or host is None or info.local_world_size == info.world_size:
        return None
    excepted = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY")).replace(" ", "").split(",")
    if any(word == "*" or (word and f".{host}".endswith(f".{word.lstrip('.')}")) for word in excepted):
        return None
    message = f"{proxies[0]} is set, and no_proxy does not name rank 0's host {host}: gRPC and etcd would ask the proxy"
    return Check("proxy", message, f"export no_proxy={host}")


def check_workers(workers: int, machine: Machine) -> Check | None:
    """A rank and its loader processes want a CPU each; launchers bind ranks to fewer than people think."""
    if workers == 0 or machine.cpus is None or machine.cpus > workers:
        return None
    message = f"{workers} loader processes and the rank itself share {machine.cpus} CPUs"
    remedy = "give each rank more (--cpus-per-rank; Open MPI: --bind-to none), or use fewer workers"
    return Check("loader processes", message, remedy)


def _counts(text: str) -> list[int]:
    from hpcddp.errors import LaunchError

    try:
        return expand_counts(text) if text else []
    except LaunchError:
        return []  # others say what is wrong with it


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
