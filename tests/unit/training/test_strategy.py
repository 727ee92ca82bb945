"""A sharded model trains as a whole one, and its checkpoints fit any number of ranks under any strategy."""

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


def test_what_does_not_go_with_a_strategy_is_refused_in_words(run_ranks: RunRanks) -> None:
    expected = {
        "unknown": "(parallel=…) 'fsdb' is not known | one of ddp, zero1, fsdp, hsdp (did you mean 'fsdp'?)",
        "too many": "shard=2 does not give 3 ranks, the product of all degrees",
        "exact": "8 slices are not as many for each of 3 ranks",
        "uneven": "hsdp needs as many ranks on each node; there are 2 on node0, 1 on node1",
        "no blocks": "the model has no Conv2d to make blocks of",
        "single number": "cannot split this model: fully_shard",
        "optimizer first": "optimizer was made before rt.wrap()",
        "evaluation": "ranks one batch less",
    }
    told = run_ranks("checkpoint_bodies:wrap_wrongly", 3, list(expected)).check().outputs[0]
    for case, words in expected.items():
        (line,) = (line for line in told.splitlines() if line.startswith(f"{case}: "))
        assert words in line


def test_every_rank_of_a_sharded_model_evaluates_as_often_and_each_sample_counts_once(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("checkpoint_bodies:evaluate_sharded", 3, str(tmp_path)).check()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [count for count, *_ in results] == [2, 2, 2]
    assert [sample for _, seen, *_ in results for sample in seen] == list(range(23))
    for _, _, found, expected in results:
        assert found == pytest.approx(expected, rel=1e-12)


CHAINS = {
    "one file": [("ddp", 2, None), ("fsdp", 4, None), ("fsdp", 3, None), ("ddp", 1, None)],
    "own steps": [("zero1", 2, None), ("zero1", 3, "async"), ("fsdp", 3, None), ("hsdp", 2, None)],
    "a mesh": [("fsdp", 2, None), ({"data": 2, "shard": 2}, 4, "async"), ("zero1", 2, None), ("ddp", 1, None)],
    "parts of copies": [("ddp", 4, "async"), ("ddp", 2, "async"), ("fsdp", 3, "async"), ("ddp", 4, None)],
}


@pytest.mark.parametrize("chain", [pytest.param(name, marks=pytest.mark.slow) for name in CHAINS])
def test_a_chain_of_ranks_strategies_and_forms_follows_one_undisturbed_run(
    run_ranks: RunRanks, tmp_path: Path, chain: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {"epochs": 3, "ema": True}
    run_ranks(BODY, 1, {**common, "out": str(whole)}).check()
    weights: list[list[torch.Tensor]] = []
    seen: Counter[tuple[int, int]] = Counter()
    stops = (2, 4, 7, None)[-len(CHAINS[chain]) :]
    for stop_at, (strategy, world_size, form) in zip(stops, CHAINS[chain], strict=True):
        out = tmp_path / f"part-{stop_at}"
        more = {"parallel": strategy, "checkpoint": form, "stop_at": stop_at, "run_dir": str(parts), "out": str(out)}
        run_ranks(BODY, world_size, {**common, **more}, env={"HPCDDP_ATTEMPT": f"{stop_at}"}).check()
        weights += torch.load(out)["weights"]
        for path in tmp_path.glob(f"{out.name}.seen-*"):
            seen.update(map(tuple, json.loads(path.read_text())))
    last, expected = torch.load(out), torch.load(whole)
    averages = ([list(part["states"]["ema"].values())] for part in (last, expected))
    assert _apart(*averages) < 1e-12
    assert _apart(weights, expected["weights"]) < 1e-12
    assert seen == Counter((epoch, sample) for epoch in range(3) for sample in range(23))
