"""Which device a rank takes, or which devices.

A local rank is not a device index: a scheduler may show each rank one GPU, and that is number 0.
"""

from __future__ import annotations

import os

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import all_schedulers
from hpcddp.units import format_count, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# How their device files are called: NVIDIA's, AMD's, Intel's and other GPUs', Windows' GPUs under Linux, TPUs, Intel's
# Gaudi, Huawei's Ascend, AWS's Trainium.
_ACCELERATORS = ("nvidia", "kfd", "renderD", "dxg", "accel", "habana", "hl", "davinci", "neuron")


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


def count_gpus(env: Mapping[str, str], devices: str = "/dev") -> int:
    """Those that the scheduler's mask shows; without a mask, NVIDIA's that this machine has."""
    for mask in _MASKS:
        visible = visible_devices(env, mask)
        if visible is not None:
            return len(visible)
    names = os.listdir(devices)
    return sum(name.startswith("nvidia") and read_number(name.removeprefix("nvidia")) is not None for name in names)


def has_no_accelerator(env: Mapping[str, str], devices: str = "/dev") -> bool:
    """Whether a program could find no GPU or other accelerator here: the mask hides all, or the machine has none."""
    if any(env.get(mask, "all").strip() in {"", "-1", "NoDevFiles"} for mask in _MASKS):
        return True
    names = {*os.listdir(devices), *(_list(os.path.join(devices, "dri")))}
    return not any(name.startswith(_ACCELERATORS) for name in names)


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def label_devices(count: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """A label for each of the `count` devices that CUDA finds: its entry in CUDA_VISIBLE_DEVICES, else its index."""
    entries = visible_devices(env) if count else None
    if entries is None or len(entries) < count:
        return tuple(str(index) for index in range(count))
    return entries[:count]


#: How many devices each rank takes, if a job file's `gpus_per_rank` says so.
GPUS_PER_RANK = "HPCDDP_GPUS_PER_RANK"


def read_gpus_per_rank(env: Mapping[str, str]) -> int:
    """How many devices each rank takes, 1 unless the job says so. LaunchError for what is no such number."""
    text = env.get(GPUS_PER_RANK) or "1"
    each = read_number(text)
    if not each:
        raise LaunchError(f"{GPUS_PER_RANK}={text} is no number of GPUs", f"export {GPUS_PER_RANK}=2, or unset it")
    return each


def choose_devices(
    visible: int, local_rank: int | None, local_world_size: int | None, each: int = 1
) -> tuple[int, ...]:
    """The indices, among the `visible` devices (1 or more) of this process, of those that it takes: `each` of them.

    If it sees no more than it takes, those are its own. With enough devices for all ranks on the node, they follow the
    local rank. LaunchError in between: ranks would share a device, which NCCL refuses. None: the launcher does not say.
    """
    if visible == each:
        return tuple(range(each))
    if visible < each:
        raise LaunchError(
            f"this rank is to have {each} devices ({GPUS_PER_RANK}), and sees {format_count(visible, 'device')}",
            f"show each rank {each} devices{_option(each)}, or ask for fewer by gpus_per_rank",
        )
    if local_rank is None or local_world_size is None:
        raise LaunchError(
            f"{visible} devices are visible, but the launcher does not say which rank of its node this is",
            f"show each rank {'one device' if each == 1 else f'{each} devices'}{_option(each)}, or use a launcher that"
            " sets a local rank",
        )
    if local_world_size * each > visible and each > 1:
        raise LaunchError(
            f"{local_world_size} ranks on this node are to have {each} devices each ({GPUS_PER_RANK}), and see"
            f" {visible}",
            f"use --ranks-per-node {max(visible // each, 1)}, or ask for more",
        )
    if local_world_size > visible:
        raise LaunchError(
            f"{local_world_size} ranks on this node see {format_count(visible, 'device')}",
            f"use --ranks-per-node {visible}, or ask for more; backend='gloo' lets ranks share a device",
        )
    return tuple(range(local_rank * each, (local_rank + 1) * each))


def _option(each: int) -> str:
    """The schedulers' options for that."""
    told = [f"{row.title}: {row.one_gpu.option}={each}" for row in all_schedulers() if row.one_gpu.option]
    return f" ({', '.join(told)})" if told else ""
