"""Which device a rank takes.

A local rank is not a device index: a scheduler may show each rank one GPU, and that is number 0.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.rankinfo import RankInfo


def visible_devices(env: Mapping[str, str], mask: str = "CUDA_VISIBLE_DEVICES") -> tuple[str, ...] | None:
    """The entries of a mask: indices, `GPU-<uuid>` or `MIG-…`. None: it is not set (all devices); empty: it hides all.

    As CUDA reads it: an entry that means no device (`-1`, `NoDevFiles`) hides what follows. LaunchError on an entry
    that comes twice, which CUDA takes for no device at all. The mask is the scheduler's: it is read, never written,
    for another one might take another job's device.
    """
    if mask not in env:
        return None
    entries: list[str] = []
    for entry in (word.strip() for word in env[mask].split(",")):
        if not (entry.replace(".", "").isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        if entry in entries:
            raise LaunchError(
                f"{mask}={env[mask]} names {entry} twice, so no device is visible",
                "name each device once",
            )
        entries.append(entry)
    return tuple(entries)


def device_index(info: RankInfo, visible: int) -> int | None:
    """The index, among `visible` devices that this process sees, of the one it takes. None: there are none.

    One visible device is number 0. With at least as many devices as ranks on the node, it is the local rank.
    LaunchError in between: ranks would share a device, which NCCL refuses, and a remainder would only hide it.
    """
    if visible == 0:
        return None
    if visible == 1:
        return 0
    if info.local_rank is None or info.local_world_size is None:
        raise LaunchError(
            f"{visible} devices are visible, but {info.launcher} does not say which rank of its node this is",
            "show each rank one device (Slurm: --gpus-per-task=1), or use a launcher that sets a local rank",
        )
    if info.local_world_size > visible:
        raise LaunchError(
            f"{info.local_world_size} ranks are on this node ({info.source.get('local_world_size')}), "
            f"but {visible} devices are visible",
            f"start at most {visible} ranks per node, or give the job more devices",
        )
    return info.local_rank
