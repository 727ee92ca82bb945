"""The software and hardware that a run ran with, as far as it can change a number."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

import hpcddp

# these may differ between runs and ranks: they change no number
_HARMLESS = {"hpcddp", "python", "machine"}


def list_versions() -> dict[str, str | None]:
    """Versions by name; None for what this build of torch does not have."""
    vision = sys.modules.get("torchvision")
    return {
        "hpcddp": hpcddp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": torch.version.git_version,
        "torchvision": vision.__version__ if vision is not None else None,
        "cuda": torch.version.cuda,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def list_numerics(device: torch.device) -> dict[str, Any]:
    """List what selects this rank's kernels: the processor and its instructions, threads, GPU, torch's switches."""
    on_gpu = device.type == "cuda"
    return {
        "cpu": _name_cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]  # torch does not annotate it
        "matmul_precision": torch.get_float32_matmul_precision(),  # other than "highest": TF32 or bf16 inside
    }


def list_conditions(device: torch.device) -> dict[str, Any]:
    """The hardware and software that the numbers of a run depend on."""
    all_versions = {**list_versions(), **list_numerics(device)}
    return {name: value for name, value in all_versions.items() if name not in _HARMLESS}


def name_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """`torch is 2.15.0, not 2.13.0` for each condition that both have and that differs: their value, then ours."""
    both = [name for name in ours if name in theirs]
    return [f"{name} is {theirs[name]}, not {ours[name]}" for name in both if ours[name] != theirs[name]]


def _name_cpu() -> str | None:
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return next(line for line in file if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or None
