"""The software that a run ran with."""

from __future__ import annotations

import platform
import sys

import torch

import hpcddp


def list_versions() -> dict[str, str | None]:
    """Versions by name; None for what this build of torch does not have."""
    vision = sys.modules.get("torchvision")
    return {
        "hpcddp": hpcddp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": vision.__version__ if vision is not None else None,
        "cuda": torch.version.cuda,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
