"""Which device a rank computes on. A local rank and a device index are different things."""

from __future__ import annotations

from hpcddp.errors import LaunchError


def list_visible(count: int, cuda_visible_devices: str | None) -> tuple[str, ...]:
    """A label for each device that this process can see: what CUDA_VISIBLE_DEVICES calls it (a number, GPU-… or MIG-…).

    `count` is what the CUDA runtime sees; without the variable the labels are the indices.
    """
    names = [name.strip() for name in (cuda_visible_devices or "").split(",") if name.strip()]
    return tuple(names[:count]) if len(names) >= count else tuple(str(i) for i in range(count))


def choose_index(visible: int, local_rank: int, local_world_size: int) -> int:
    """The device index: 0 where the launcher shows each rank its own device only, else the local rank.

    Raises LaunchError where the ranks of a node would have to share: two NCCL ranks cannot use one GPU.
    """
    if visible == 1:
        return 0
    if visible < local_world_size:
        raise LaunchError(
            f"{local_world_size} ranks on this node see {visible} GPUs",
            f"use --ranks-per-node {visible}, or backend='gloo' if they are meant to share",
        )
    return local_rank


def name_shared(labels: list[tuple[str, str]]) -> str | None:
    """What is wrong if two ranks have the same (host, device label); `labels` by rank. None if nothing is."""
    owner: dict[tuple[str, str], int] = {}
    for rank, label in enumerate(labels):
        if label in owner:
            return f"ranks {owner[label]} and {rank} both got GPU {label[1]} of {label[0]}"
        owner[label] = rank
    return None


def wants_device_id(torch_version: str) -> bool:
    """Whether `init_process_group(device_id=…)` is safe; faulty in 2.6.0 <= torch < 2.7.1 (pytorch#153960)."""
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:3] if part.isdigit())
    return not (2, 6, 0) <= numbers < (2, 7, 1)
