"""A rank's random state, for frameworks that do not save it."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch


def save_random_state(folder: Path, rank: int) -> None:
    """Of Python, numpy if it is used, torch and this rank's GPU."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    torch.save(state, _name(folder, rank))


def restore_random_state(folder: Path, rank: int) -> bool:
    """Whether there was one for this rank."""
    path = _name(folder, rank)
    if not path.is_file():
        return False
    state = torch.load(path, weights_only=True)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))
    return True


def _name(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:04d}.pt"
