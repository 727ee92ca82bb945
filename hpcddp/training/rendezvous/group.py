"""A rank's place in a running process group, as a plain value; and which devices and how many CPU threads it computes
with. A local rank is not a device index."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hpcddp.errors import LaunchError
from hpcddp.ranks.device import choose_devices, no_gpu
from hpcddp.ranks.network import set_interface
from hpcddp.training.torch_compat import Store
from hpcddp.units import format_count


class Member(NamedTuple):
    """One rank, described by itself."""

    rank: int
    host: str
    pid: int
    local_rank: int | None  # None: the launcher does not say
    cpus: str  # the CPUs it may run on, as text: equal text means that they are shared
    gpus: tuple[str, ...]  # the labels of the devices it can see
    no_gpu: str = ""  # why it sees none, for people


Members = tuple[Member, ...]  # every rank, by rank


@dataclass(frozen=True, slots=True)
class Group:
    """What `hpcddp.init()` gives. The process group itself is torch's default group."""

    rank: int
    world_size: int
    launcher: str
    backend: str
    device: torch.device
    members: Members
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
        return find_local_place(self.members, self.rank)[0]

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this rank's host."""
        return find_local_place(self.members, self.rank)[1]

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def describe(self) -> str:
        """`4 ranks on 2 nodes (node1, node2), launcher openmpi, gloo on cpu`."""
        nodes, ranks = format_count(len(self.hosts), "node"), format_count(self.world_size, "rank")
        shown = ", ".join(self.hosts[:4]) + (", …" if len(self.hosts) > 4 else "")
        return f"{ranks} on {nodes} ({shown}), launcher {self.launcher}, {self.backend} on {self.device.type}"


def find_local_place(members: Members, rank: int) -> tuple[int, int]:
    """A rank's number on its host, the launcher's or else by rank, and how many ranks are there."""
    me = members[rank]
    here = [member.rank for member in members if member.host == me.host]
    return here.index(rank) if me.local_rank is None else me.local_rank, len(here)


def choose_backend(members: Members, gpus_per_node: int) -> str:
    """nccl where the ranks see GPUs, else gloo. LaunchError on every rank where some see none, or all in a job that has
    GPUs: they would wait for each other for ever, or train on CPUs without a word."""
    blind = [member for member in members if not member.gpus]
    if not blind:
        return "nccl"
    if len(blind) == len(members) and not gpus_per_node:
        return "gloo"
    more = f" (and {len(blind) - 1} more)" if len(blind) > 1 else ""
    named = f"rank {blind[0].rank} on {blind[0].host}{more}"
    if len(blind) == len(members):
        raise no_gpu(f"{named} sees none", gpus_per_node, blind[0].no_gpu)
    seeing = next(member for member in members if member.gpus)
    raise LaunchError(
        f"{named} sees no GPU, and rank {seeing.rank} on {seeing.host} sees {format_count(len(seeing.gpus), 'GPU')}:"
        f" {blind[0].no_gpu}",
        f"look at {blind[0].host} with nvidia-smi; backend='gloo' trains on what each rank has",
    )


def device_indices(members: Members, rank: int, backend: str, each: int = 1) -> tuple[int, ...]:
    """Which of the devices that it sees a rank uses, `each` of them; () without any. Only gloo ranks may share one."""
    visible = len(members[rank].gpus)
    if not visible:
        return ()
    local_rank, local_world_size = find_local_place(members, rank)
    if backend == "nccl":
        return choose_devices(visible, local_rank, local_world_size, each)
    return tuple(dict.fromkeys((local_rank * each + n) % visible for n in range(each)))


def take_devices(backend: str, members: Members, rank: int, each: int = 1) -> tuple[torch.device, ...]:
    """The rank's devices, the first made current before any collective can guess another one. LaunchError where nccl
    has none, or where two ranks have one."""
    indices = device_indices(members, rank, backend, each)
    if not indices:
        if backend == "nccl":
            raise LaunchError(
                f"backend nccl, but rank {rank} on {members[rank].host} sees no GPU",
                "use the gloo backend, or ask for GPUs",
            )
        return (torch.device("cpu"),)
    if backend == "nccl":
        _check_unshared(members, each)
    torch.cuda.set_device(indices[0])
    return tuple(torch.device("cuda", index) for index in indices)


def _check_unshared(members: Members, each: int) -> None:
    """LaunchError if two ranks have taken one GPU."""
    owners: dict[tuple[str, str], int] = {}
    for member in members:
        for index in device_indices(members, member.rank, "nccl", each):
            label = member.gpus[index]
            owner = owners.setdefault((member.host, label), member.rank)
            if owner != member.rank:
                raise LaunchError(
                    f"ranks {owner} and {member.rank} both got GPU {label} of {member.host}",
                    "fewer --ranks-per-node, or more GPUs; backend='gloo' lets ranks share one",
                )


def set_threads(env: Mapping[str, str], members: Members, rank: int) -> None:
    """Divide CPUs among the ranks that may run on them, unless OMP_NUM_THREADS is set: torch would take them all."""
    if "OMP_NUM_THREADS" in env:
        return
    me = members[rank]
    sharers = sum((member.host, member.cpus) == (me.host, me.cpus) for member in members)
    torch.set_num_threads(max(1, len(me.cpus.split(",")) // sharers))


def settle_interface(
    env: MutableMapping[str, str], backend: str, host: str, hosts: Iterable[str], *, prints: bool
) -> None:
    """Set the network interface for this backend, before its first group, where it would take one that the other ones
    of the hosts cannot reach."""
    remark = set_interface(env, backend, host, next((other for other in hosts if other != host), None))
    if remark and prints:
        print(f"hpcddp: {remark}", file=sys.stderr, flush=True)
