"""What the ranks of test_old_runs.py run: the loop of tests/captures/runs-0.1/train.py, from its checkpoints on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcddp
from hpcddp.training.checkpoint.tracked import Tracked


def resume_all(argument: dict[str, Any]) -> None:
    """Each run of argument["runs"] to its end; rank 0 writes what was loaded of each to argument["out"]."""
    loaded = {name: _resume(Path(path), exact=name == "exact") for name, path in argument["runs"].items()}
    if all(found["is_first"] for found in loaded.values()):
        Path(argument["out"]).write_text(json.dumps(loaded))


def _resume(run_dir: Path, *, exact: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    how: dict[str, Any] = {"exact": "tree", "slices": 2} if exact else {}
    # by name: this command is another than the one that began the run
    how["resume"] = run_dir.name
    with hpcddp.runtime(global_batch=8, seed=3, run_dir=str(run_dir), save_every=2, keep=2, **how) as rt:
        model = rt.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
        loader = rt.loader(dataset)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
        found = {"step": rt.steps, "sha256": Tracked({"model": model}).hash_weights(), "is_first": rt.group.is_first}
        for _ in rt.epochs(2):
            for x, y in loader:
                rt.backward(nn.functional.cross_entropy(model(x), y))
                rt.step(optimizer, scheduler=scheduler)
    return found
