"""A rank's place in a running process group, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcddp.training.rendezvous.device import device_indices, share_cpus
from hpcddp.training.rendezvous.roll_call import Member, local_rank_of, ranks_on_host
from hpcddp.training.torch_compat import Store
from hpcddp.units import format_count


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
    more_devices: tuple[torch.device, ...] = ()  # of this rank, where it has several (gpus_per_rank)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank, `device` first."""
        return self.device, *self.more_devices

    @property
    def host(self) -> str:
        """The name of this rank's host."""
        return self.members[self.rank].host

    @property
    def hosts(self) -> tuple[str, ...]:
        """The different hosts, in the order of their lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, from 0."""
        return local_rank_of(self.members, self.rank)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this rank's host."""
        return ranks_on_host(self.members, self.rank)

    @property
    def cpus(self) -> int:
        """CPUs of this rank: those that it may use, divided among the ranks that may use the same."""
        return share_cpus(self.members, self.rank)

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def device_name(self, rank: int) -> str:
        """`cpu`, or `cuda:` with the indices that this rank chose among the devices it sees."""
        indices = device_indices(self.members, rank, self.backend, len(self.devices))
        return f"cuda:{','.join(map(str, indices))}" if indices else "cpu"

    def describe(self) -> str:
        """`4 ranks on 2 nodes (node1, node2), launcher openmpi, gloo on cpu`."""
        nodes, ranks = format_count(len(self.hosts), "node"), format_count(self.world_size, "rank")
        shown = ", ".join(self.hosts[:4]) + (", …" if len(self.hosts) > 4 else "")
        return f"{ranks} on {nodes} ({shown}), launcher {self.launcher}, {self.backend} on {self.device.type}"
