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

#: How many GPUs the job has on each node: `hpcddp exec` sets it where its line says so, and where it could see one.
GPUS_PER_NODE = "HPCDDP_GPUS_PER_NODE"
#: How many devices each rank takes, if a job file's `gpus_per_rank` says so.
GPUS_PER_RANK = "HPCDDP_GPUS_PER_RANK"
# How a vendor's device files begin, and the masks that its driver reads, the scheduler's first.
_MASKS = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "kfd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "renderD": ("ZE_AFFINITY_MASK",),
}
# How the device files of accelerators begin: NVIDIA's, AMD's, Intel's and other GPUs', Windows' GPUs under Linux, TPUs,
# Intel's Gaudi, Huawei's Ascend, AWS's Trainium.
_ACCELERATORS = ("nvidia", "kfd", "renderD", "dxg", "accel", "habana", "hl", "davinci", "neuron")


def visible_devices(env: Mapping[str, str], mask: str = "CUDA_VISIBLE_DEVICES") -> tuple[str, ...] | None:
    """The entries of a mask: indices, `GPU-<uuid>` or `MIG-…`. None: it is not set (all devices); empty: it hides all.

    As CUDA reads it: an entry that means no device (`-1`, `NoDevFiles`) hides what follows. The mask is the
    scheduler's: it is read, never written, for another one might take another job's device.
    """
    if mask not in env:
        return None
    entries: list[str] = []
    for entry in (word.strip() for word in env[mask].split(",")):
        if not (entry.replace(".", "").isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return tuple(entries)


def count_visible_gpus(env: Mapping[str, str], devices: str = "/dev") -> int:
    """Count the GPUs that the scheduler's mask shows; without a mask, the NVIDIA GPUs of this machine."""
    for mask, *_ in _MASKS.values():
        visible = visible_devices(env, mask)
        if visible is not None:
            return len(visible)
    names = os.listdir(devices)
    return sum(name.startswith("nvidia") and read_number(name.removeprefix("nvidia")) is not None for name in names)


def why_no_accelerator(env: Mapping[str, str], devices: str = "/dev") -> str:
    """Say why no program can use a GPU or another accelerator here: there is none, or masks hide all.
    Empty where one could be found."""
    names = {*_list(devices), *_list(os.path.join(devices, "dri"))}
    if not any(name.startswith(_ACCELERATORS) for name in names):
        return f"this host has no GPU: there is no {devices}/nvidia*, {devices}/kfd or the like"
    masks = next((of for vendor, of in _MASKS.items() if any(name.startswith(vendor) for name in names)), ())
    hides = next((mask for mask in masks if visible_devices(env, mask) == ()), "")
    return f"{hides}={env[hides]!r} hides all GPUs of this host" if hides else ""


def asks_for_cpu(env: Mapping[str, str]) -> bool:
    """Whether the program is to train on CPUs although its job has GPUs: what Accelerate reads counts for each."""
    return env.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes"}


def no_gpu(who: str, each: int, why: str) -> LaunchError:
    """The error of a job that has `each` GPUs on each node, and whose ranks would train on CPUs."""
    from hpcddp.guard.hpcddp_guard import HINT_NO_GPU

    return LaunchError(f"the job has {format_count(each, 'GPU')} on each node, and {who}: {why}", HINT_NO_GPU)


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


def read_gpus_per_node(env: Mapping[str, str]) -> int:
    """Read what `hpcddp exec` has set; 0: nothing."""
    return read_number(env.get(GPUS_PER_NODE, "")) or 0


def read_gpus_per_rank(env: Mapping[str, str]) -> int:
    """How many devices each rank takes, 1 unless the job says so."""
    return read_number(env.get(GPUS_PER_RANK, "")) or 1


def choose_devices(
    visible: int, local_rank: int | None, local_world_size: int | None, each: int = 1
) -> tuple[int, ...]:
    """The indices, among the `visible` devices (1 or more) of this process, of those that it takes: `each` of them.

    If it sees no more than it takes, those are its own. With enough devices for all ranks on the node, they follow the
    local rank. LaunchError in between: ranks would share a device, which NCCL refuses. None: the launcher does not say.
    """
    if visible == each:
        return tuple(range(each))
    devices = "one device" if each == 1 else f"{each} devices"
    if visible < each or local_rank is None or local_world_size is None:
        why = "the launcher does not say which rank of its node this is" if visible > each else f"it is to have {each}"
        raise LaunchError(
            f"this rank sees {format_count(visible, 'device')}, and {why}", f"show each rank {devices}{_option(each)}"
        )
    if local_world_size * each > visible:
        share = "; backend='gloo' lets ranks share a device" if each == 1 else ""
        raise LaunchError(
            f"{local_world_size} ranks on this node are to have {devices} each, and see {visible}",
            f"use --ranks-per-node {max(visible // each, 1)}, or ask for more{share}",
        )
    return tuple(range(local_rank * each, (local_rank + 1) * each))


def _option(each: int) -> str:
    options = [(row.title, row.gpus_per_rank_option) for row in all_schedulers() if row.gpus_per_rank_option]
    return f" ({', '.join(f'{title}: {option}={each}' for title, option in options)})"
