"""Which devices and how many CPU threads a rank computes with. A local rank is not a device index."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpcddp.errors import LaunchError
from hpcddp.ranks.device import choose_devices
from hpcddp.training.rendezvous.roll_call import Member, local_rank_of, ranks_on_host


def device_indices(members: tuple[Member, ...], rank: int, backend: str, each: int = 1) -> tuple[int, ...]:
    """Which of the devices that it sees a rank uses, `each` of them; () without any. Only gloo ranks may share one."""
    visible = len(members[rank].gpus)
    if not visible:
        return ()
    local_rank = local_rank_of(members, rank)
    if backend == "nccl":
        return choose_devices(visible, local_rank, ranks_on_host(members, rank), each)
    return tuple(dict.fromkeys((local_rank * each + n) % visible for n in range(each)))


def take_devices(backend: str, members: tuple[Member, ...], rank: int, each: int = 1) -> tuple[torch.device, ...]:
    """The rank's devices, the first made current before any collective can guess another one."""
    indices = device_indices(members, rank, backend, each)
    if not indices:
        if backend == "nccl":
            host = members[rank].host
            raise LaunchError(
                f"backend nccl, but rank {rank} on {host} sees no GPU", "use the gloo backend, or ask for GPUs"
            )
        return (torch.device("cpu"),)
    if backend == "nccl":
        chosen = [(m, device_indices(members, m.rank, backend, each)) for m in members]
        if shared := name_shared([[(m.host, m.gpus[i]) for i in taken] for m, taken in chosen]):
            raise LaunchError(shared, "give each rank its own GPU: as many GPUs per node as ranks per node")
    torch.cuda.set_device(indices[0])
    return tuple(torch.device("cuda", index) for index in indices)


def name_shared(labels: list[list[tuple[str, str]]]) -> str | None:
    """The error if two ranks have the same (host, device label), else None; `labels` of each rank's, by rank."""
    owner: dict[tuple[str, str], int] = {}
    for rank, label in ((rank, label) for rank, own in enumerate(labels) for label in own):
        if label in owner:
            return f"ranks {owner[label]} and {rank} both got GPU {label[1]} of {label[0]}"
        owner[label] = rank
    return None


def share_cpus(members: tuple[Member, ...], rank: int) -> int:
    """CPUs of a rank: those that it may run on, divided among the ranks that may run on the same."""
    me = members[rank]
    sharers = sum((m.host, m.cpus) == (me.host, me.cpus) for m in members)
    return max(1, len(me.cpus.split(",")) // sharers)


def set_threads(env: Mapping[str, str], members: tuple[Member, ...], rank: int) -> None:
    """Divide CPUs among the ranks that may run on them, unless OMP_NUM_THREADS is set: torch would take them all."""
    if "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(share_cpus(members, rank))
