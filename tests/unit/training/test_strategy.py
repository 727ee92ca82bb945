"""A model in parts trains as a whole one, and its checkpoints fit any number of ranks under any strategy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunRanks = Callable[..., Any]
BODY = "checkpoint_bodies:train"


def _apart(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> float:
    """The largest difference of any weight at any step."""
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max()) for mine, yours in pairs for a, b in zip(mine, yours, strict=True))


def test_a_model_in_parts_has_the_weights_of_one_process_at_every_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = {
        "uneven": {"global_batch": 10},  # 23 = 10 + 10 + 3: on 4 ranks the last step leaves one without samples
        "accumulated": {"global_batch": 11, "max_micro_batch": 2},
    }
    for world_size, strategy in ((1, "fsdp"), (2, "fsdp"), (4, "fsdp"), (4, "hsdp")):
        arguments = [
            {**case, "strategy": strategy, "out": str(tmp_path / f"{name}-{strategy}-{world_size}")}
            for name, case in cases.items()
        ]
        run_ranks(BODY + "_all", world_size, arguments).check()
        for name in cases:
            ours = torch.load(tmp_path / f"{name}-{strategy}-{world_size}")["weights"]
            theirs = torch.load(tmp_path / f"{name}-fsdp-1")["weights"]
            assert _apart(ours, theirs) < 1e-12, (name, strategy, world_size)


CHAINS = {
    "one file": [("ddp", 2, None), ("fsdp", 4, None), ("fsdp", 3, None), ("ddp", 1, None)],
    "and back": [("ddp", 1, None), ("fsdp", 3, "single"), ("hsdp", 2, "async"), ("ddp", 2, "sharded")],
    "beside the training": [("ddp", 4, "async"), ("ddp", 2, "async"), ("fsdp", 3, "async"), ("ddp", 1, "sharded")],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_ranks_strategies_and_forms_follows_one_undisturbed_run(
    run_ranks: RunRanks, tmp_path: Path, chain: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {"epochs": 3, "ema": chain == "beside the training" and False}
    run_ranks(BODY, 1, {**common, "out": str(whole)}).check()
    weights: list[list[torch.Tensor]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for stop_at, (strategy, world_size, form) in zip((2, 4, 7, None), CHAINS[chain], strict=True):
        out = tmp_path / f"part-{stop_at}"
        more = {"strategy": strategy, "checkpoint": form, "stop_at": stop_at, "run_dir": str(parts), "out": str(out)}
        run_ranks(BODY, world_size, {**common, **more}, env={"HPCDDP_ATTEMPT": f"{stop_at}"}).check()
        weights += torch.load(out)["weights"]
        for path in tmp_path.glob(f"{out.name}.seen-*"):
            seen.update(map(tuple, json.loads(path.read_text())))
    expected = torch.load(whole)
    assert _apart(weights, expected["weights"]) < 1e-12
    assert seen == Counter((epoch, sample) for epoch in range(3) for sample in range(23))
