"""What `hpcddp advise` says of the memory of a rank is what real ranks hold, within 15 %."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcddp.advise.measure import Sample, measure_model
from hpcddp.advise.memory import PRECISIONS, Model, ParallelDims, Work, peak
from hpcddp.advise.transformer import Numbers, make_transformer

from . import advise_bodies as bodies

RunRanks = Callable[..., Any]
MEASURED: dict[tuple[Any, ...], Model] = {}
SMALL = {"layers": 4, "hidden": 128, "vocabulary": 500, "tokens": 64}
DEEP = {"layers": 8, "hidden": 192, "vocabulary": 300, "tokens": 128}
WIDE = {"layers": 3, "hidden": 256, "vocabulary": 4000, "tokens": 32}
PIXELS = {"channels": 16, "blocks": 2}
MORE_PIXELS = {"channels": 48, "blocks": 3}
# Model, sizes, micro batch, precision, and what else differs: some hold activations most of all, some weights.
CASES: list[tuple[str, dict[str, int], int, str, dict[str, Any]]] = [
    ("transformer", SMALL, 8, "fp32", {}),
    ("transformer", SMALL, 8, "bf16-mixed", {"foreach": True}),
    ("transformer", WIDE, 1, "fp32", {"optimizer": "momentum", "passes": 2}),
    ("transformer", WIDE, 8, "bf16", {}),
    ("transformer", DEEP, 4, "fp32", {"recompute": True}),
    ("convolutions", PIXELS, 16, "fp32", {}),
    ("convolutions", MORE_PIXELS, 8, "fp32", {"optimizer": "momentum", "passes": 2}),
]


def cases(split: str) -> list[dict[str, Any]]:
    """A CPU has no batch norm with weights in 16 bit and statistics in 32: there, all of it is in 16."""
    names = ("model", "sizes", "micro_batch", "precision")
    sharded = {"precision": "bf16"} if split in {"fsdp", "hsdp"} else {}
    found = [
        {"optimizer": "adamw", "split": split, **dict(zip(names, case, strict=False)), **case[4]} for case in CASES
    ]
    return [
        case | sharded if (case["model"], case["precision"]) == ("convolutions", "bf16-mixed") else case
        for case in found
    ]


def advise(case: dict[str, Any], ranks: int, *, by_numbers: bool = False) -> Any:
    """The estimate for a case."""
    sizes, recompute = case["sizes"], case.get("recompute", False)
    if by_numbers:
        whole = advise_model(case)
        numbers = Numbers(whole.elements, sizes["layers"], sizes["hidden"], sizes["tokens"], sizes["vocabulary"])
        model = make_transformer(numbers, case["precision"], recompute=recompute)
    else:
        model = advise_model(case)
    shard = {"fsdp": ranks, "hsdp": 2, "tensor": ranks // 2}.get(case["split"], 1)
    split = ParallelDims(
        ranks, shard=shard, tensor=2 if case["split"] == "tensor" else 1, zero=case["split"] == "zero1"
    )
    work = Work(
        PRECISIONS[case["precision"]],
        case["optimizer"],
        case["micro_batch"],
        accumulates=case.get("passes", 1) > 1,
        loops=not case.get("foreach", False),
    )
    return peak(model, split, work)


def advise_model(case: dict[str, Any]) -> Model:
    """By a pass on tensors without numbers. The same of each split."""
    tokens, recompute = case["model"] == "transformer", case.get("recompute", False)
    key = (case["model"], *case["sizes"].values(), case["micro_batch"], case["precision"], recompute)
    if key not in MEASURED:
        sample = Sample((case["sizes"]["tokens"],) if tokens else (3, 32, 32), tokens=tokens)
        make = partial(bodies.MODELS[case["model"]], **case["sizes"])
        MEASURED[key] = measure_model(
            make, "make_model", case["precision"], sample, case["micro_batch"], recompute=recompute
        )
    return MEASURED[key]


def check(found: list[int], tried: list[dict[str, Any]], ranks: int) -> None:
    wrong = []
    for measured, case in zip(found, tried, strict=True):
        ways = {True} if case["split"] == "tensor" else {False, case["model"] == "transformer"}
        for by_numbers in ways:
            estimate = advise(case, ranks, by_numbers=by_numbers)
            off = estimate.total / measured - 1
            print(f"{off:+.1%} {'numbers' if by_numbers else 'model'} {case} {estimate}")
            if abs(off) > 0.15:
                wrong.append(
                    f"{off:+.1%} of {measured}, by {'numbers' if by_numbers else 'the model'}: {case} {estimate}"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "ranks"), [("ddp", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]
)
def test_the_memory_of_a_step_is_estimated_within_15_percent(
    run_ranks: RunRanks, tmp_path: Path, split: str, ranks: int
) -> None:
    tried, out = cases(split), tmp_path / "peaks.json"
    run_ranks("advise_bodies:train", ranks, tried, env={"ADVISE_OUT": str(out)}).check()
    check(json.loads(out.read_text()), tried, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_memory_of_tensor_parallelism_is_estimated_within_15_percent_by_numbers(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    tried = [case for case in cases("tensor") if case["model"] == "transformer" and case["precision"] == "fp32"]
    out = tmp_path / "peaks.json"
    run_ranks("advise_bodies:train", ranks, tried, env={"ADVISE_OUT": str(out)}).check()
    check(json.loads(out.read_text()), tried, ranks)
