"""A rank's place in a running process group, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from hpcddp.training.bringup.device import choose_index
from hpcddp.training.bringup.roll_call import Member, local_rank_of, ranks_on_host


@dataclass(frozen=True, slots=True)
class Group:
    """What `hpcddp.init()` gives. The process group itself is torch's default group."""

    rank: int
    world_size: int
    launcher: str
    backend: str
    device: torch.device
    members: tuple[Member, ...]  # every rank, by rank
    store: Store

    @property
    def host(self) -> str:
        return self.members[self.rank].host

    @property
    def hosts(self) -> tuple[str, ...]:
        """The different hosts, in the order of their lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    @property
    def local_rank(self) -> int:
        return local_rank_of(self.members, self.rank)

    @property
    def local_world_size(self) -> int:
        return ranks_on_host(self.members, self.rank)

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def device_name(self, rank: int) -> str:
        """`cpu`, or `cuda:` with the index that this rank chose among the devices it sees."""
        index = device_index(self.members, rank, self.backend)
        return "cpu" if index is None else f"cuda:{index}"

    def describe(self) -> str:
        """`4 ranks on 2 nodes (node1, node2), launcher openmpi, gloo on cpu`."""
        nodes = f"{len(self.hosts)} nodes" if len(self.hosts) > 1 else "1 node"
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 rank"
        shown = ", ".join(self.hosts[:4]) + (", …" if len(self.hosts) > 4 else "")
        return f"{ranks} on {nodes} ({shown}), launcher {self.launcher}, {self.backend} on {self.device.type}"


def device_index(members: tuple[Member, ...], rank: int, backend: str) -> int | None:
    """Which of the devices that it sees a rank uses; None without any. Only gloo ranks may share one."""
    visible = len(members[rank].gpus)
    if not visible:
        return None
    local_rank = local_rank_of(members, rank)
    return (
        choose_index(visible, local_rank, ranks_on_host(members, rank)) if backend == "nccl" else local_rank % visible
    )
