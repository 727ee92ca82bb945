"""Which device and how many CPU threads a rank computes with. A local rank is not a device index."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpcddp.errors import LaunchError
from hpcddp.ranks.device import choose_device_index
from hpcddp.training.rendezvous.roll_call import Member, local_rank_of, ranks_on_host


def device_index(members: tuple[Member, ...], rank: int, backend: str) -> int | None:
    """Which of the devices that it sees a rank uses; None without any. Only gloo ranks may share one."""
    visible = len(members[rank].gpus)
    if not visible:
        return None
    local_rank = local_rank_of(members, rank)
    if backend == "nccl":
        return choose_device_index(visible, local_rank, ranks_on_host(members, rank))
    return local_rank % visible


def take_device(backend: str, members: tuple[Member, ...], rank: int) -> torch.device:
    """The rank's device, made current before any collective can guess another one."""
    index = device_index(members, rank, backend)
    if index is None:
        if backend == "nccl":
            host = members[rank].host
            raise LaunchError(
                f"backend nccl, but rank {rank} on {host} sees no GPU", "use the gloo backend, or ask for GPUs"
            )
        return torch.device("cpu")
    if backend == "nccl":
        chosen = [(m, device_index(members, m.rank, backend)) for m in members]
        if shared := name_shared([(m.host, m.gpus[i]) for m, i in chosen if i is not None]):
            raise LaunchError(shared, "give each rank its own GPU: as many GPUs per node as ranks per node")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def name_shared(labels: list[tuple[str, str]]) -> str | None:
    """The error if two ranks have the same (host, device label), else None; `labels` by rank."""
    owner: dict[tuple[str, str], int] = {}
    for rank, label in enumerate(labels):
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
