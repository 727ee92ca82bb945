"""The software and hardware that a run ran with, as far as it can change a number."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

import hpcddp

_CPU_INFO = "/proc/cpuinfo"


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
    """What chooses between kernels on this rank: the processor and its instructions, threads, GPU, torch's switches."""
    on_gpu = device.type == "cuda"
    return {
        "cpu": _name_cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]  # torch does not annotate it
        "matmul_precision": torch.get_float32_matmul_precision(),  # other than "highest": TF32 or bf16 inside
        "cudnn_tf32": torch.backends.cudnn.allow_tf32 if on_gpu else None,
        "cudnn_benchmark": torch.backends.cudnn.benchmark if on_gpu else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _name_cpu() -> str | None:
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        with open(_CPU_INFO, encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, None) or platform.processor() or None
    except OSError:
        return platform.processor() or None
