"""The gradient is the mean over the global batch, however it is split: fp64, against one process, at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.training.data.sampler import permute

from . import bodies

RunRanks = Callable[..., Any]


def _deviation(out: Path, argument: dict[str, Any]) -> float:
    """The largest difference of any weight at any step from plain torch on whole global batches."""
    torch.set_num_threads(1)
    expected = bodies.reference_toy(
        argument, lambda epoch: permute(torch.arange(bodies.SAMPLES), bodies.SAMPLES, 5, epoch)
    )
    found = torch.load(out)["trajectory"]
    assert [step for step, _ in found] == list(range(1, len(expected) + 1))
    pairs = zip((weights for _, weights in found), expected, strict=True)
    return max(float((a - b).abs().max()) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


CASES = {
    "uneven": (
        10,
        None,
    ),  # 23 = 10 + 10 + 3: on 4 ranks the last step leaves one without samples
    "accumulated": (10, 2),  # up to 5 passes per step
    # 23 = 11 + 11 + 1, one sample at a time: passes without a sample in every step, and one sample for all ranks
    "single": (11, 1),
}


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4, 8))])
def test_any_split_gives_the_weights_of_one_process(run_ranks: RunRanks, tmp_path: Path, world_size: int) -> None:
    cases = {
        tmp_path / name: {"global_batch": batch, "max_micro_batch": largest, "out": str(tmp_path / name)}
        for name, (batch, largest) in CASES.items()
    }
    run_ranks("train_toys", world_size, list(cases.values())).check()
    assert {out.name: _deviation(out, argument) < 1e-12 for out, argument in cases.items()} == dict.fromkeys(
        CASES, True
    )
