"""Exact mode with a sharded model (FSDP2, HSDP): the hash of the weights is that of DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .exact_bodies import read_result

pytestmark = pytest.mark.slow  # test_exact.py has the quick case

RunRanks = Callable[..., Any]
Options = dict[str, Any]

# Augmentation, dropout, BatchNorm, and a last partial batch of 18 of 24 samples are in all of them.
COMMON: Options = {"ema": False, "epochs": 1}
CASES: dict[str, Options] = {
    "adamw, clipped": {**COMMON, "exact": "integer", "slices": 12, "clip": 0.5},
    "a fused step, a layer that some slices do not use": {
        **COMMON,
        "exact": "integer",
        "slices": 12,
        "fused": True,
        "conditional": True,
    },
    "bf16 weights, autocast": {**COMMON, "exact": "integer", "slices": 12, "sgd": True, "bf16": True, "amp": True},
}
# It takes norms over rows and columns of each parameter.
CASES["adafactor"] = {**CASES["adamw, clipped"], "optimizer": "Adafactor"}
CASES["slices without samples in the last batch"] = {**COMMON, "exact": "integer", "slices": 24}
TREE: dict[str, Options] = {"a tree": {**COMMON, "clip": 0.5}}
COPIES = {"data": 2, "shard": 2}


@pytest.fixture
def results(run_ranks: RunRanks, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """results(ranks, parallel, cases) trains each case so: {case: weights' hash and losses}."""

    def run(ranks: int, parallel: Any, cases: dict[str, Options]) -> dict[str, Any]:
        folders = {name: tmp_path / f"{ranks}-{parallel}-{name}" for name in cases}
        asked = [
            {**options, "parallel": parallel, "run_dir": str(folders[name]), "attempt": "a"}
            for name, options in cases.items()
        ]
        run_ranks("exact_bodies:train_several", ranks, asked).check()
        return {name: read_result(folder) for name, folder in folders.items()}

    return run


@pytest.mark.parametrize(
    ("ranks", "parallel", "cases"),
    [
        (3, "fsdp", CASES),
        (2, "fsdp", {**CASES, **TREE}),
        (4, COPIES, {**CASES, **TREE}),
        (2, "ddp", {**CASES, **TREE}),
        (2, "zero1", CASES),
    ],
    ids=["fsdp on 3", "fsdp on 2", "2 copies of 2 shards", "ddp on 2", "zero1 on 2"],
)
def test_the_hash_is_that_of_one_rank(
    results: Callable[..., dict[str, Any]], ranks: int, parallel: Any, cases: dict[str, Options]
) -> None:
    split, one = results(ranks, parallel, cases), results(1, "ddp", cases)
    assert all(len(result["weights"]) == 64 for result in one.values())
    assert split == one


def test_a_chain_of_splits_ends_as_one_undisturbed_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    common, whole, chain = CASES["adamw, clipped"] | {"epochs": 2}, tmp_path / "whole", tmp_path / "chain"
    run_ranks("exact_bodies:train", 1, {**common, "run_dir": str(whole), "attempt": "a"}).check()
    parts: list[tuple[int, Any, int | None]] = [(2, "ddp", 2), (3, "fsdp", 4), (4, COPIES, 6), (2, "zero1", None)]
    for ranks, parallel, stop_at in parts:
        asked = {**common, "parallel": parallel, "run_dir": str(chain), "attempt": f"{ranks}-{stop_at}"}
        run_ranks("exact_bodies:train", ranks, {**asked, "stop_at": stop_at}).check()
    assert read_result(chain) == read_result(whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slices": 8, "ranks": 3}, "8 slices are not as many for each of 3 ranks"),
        ({"wrapped_ema": True}, "takes one model, not averaged weights beside it"),
        ({"fully_shard": {"mp_policy": None}}, "does not take mp_policy"),
        ({"optimizer": "LBFGS"}, "LBFGS steps all parameters together"),
    ],
    ids=str,
)
def test_what_could_not_be_the_same_is_refused(
    run_ranks: RunRanks, tmp_path: Path, options: Options, words: str
) -> None:
    asked = {**CASES["adamw, clipped"], **options, "parallel": "fsdp", "run_dir": str(tmp_path), "attempt": "a"}
    outcome = run_ranks("exact_bodies:train", options.get("ranks", 2), asked)
    assert any(words in output for output in outcome.outputs), outcome.outputs[0]
    assert 0 not in outcome.statuses
