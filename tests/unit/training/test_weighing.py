"""Losses that are means over tokens: over those of the whole global batch, however it is split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import WeighedBatch, Weighing, run_backward, zeroed_gradients
from hpcddp.training.parallel.layout import Layout

RunRanks = Callable[..., Any]
ALONE, CPU = Layout(0, 1), torch.device("cpu")

CASES: dict[str, dict[str, Any]] = {
    "uneven": {"global_batch": 10, "loss": "mean"},  # 23 = 10 + 10 + 3: on 4 ranks one has no sample in the last step
    "accumulated": {"global_batch": 10, "loss": "mean", "options": {"max_micro_batch": 2}},
    "summed": {"global_batch": 10, "loss": "sum", "options": {"max_micro_batch": 2}, "workers": 1},
    "exact": {"global_batch": 10, "loss": "mean", "options": {"exact": "integer", "slices": 8}},
    "by weights": {"global_batch": 10, "loss": "mean", "scale": 0.003},  # together less than 1
}


def _deviation(out: Path, expected: list[list[torch.Tensor]]) -> float:
    found = torch.load(out)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4,))])
def test_any_split_of_ragged_sentences_gives_the_weights_of_one_process(
    run_ranks: RunRanks, batch_bodies: ModuleType, tmp_path: Path, world_size: int
) -> None:
    torch.set_num_threads(1)
    expected, losses = batch_bodies.reference_tokens(10)
    cases = {name: case | {"out": str(tmp_path / name)} for name, case in CASES.items()}
    cases["uneven"]["options"] = {"run_dir": str(tmp_path / "run")}
    run_ranks("batch_bodies:train_tokens", world_size, list(cases.values())).check()
    sums, _ = batch_bodies.reference_tokens(10, batch_bodies.summed)  # as plain torch gives it
    wanted = {name: sums if case["loss"] == "sum" else expected for name, case in cases.items()}
    assert {name: _deviation(tmp_path / name, wanted[name]) < 1e-11 for name in cases} == dict.fromkeys(cases, True)
    [metrics] = (tmp_path / "run").glob("attempts/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-12)
    _, y = batch_bodies.ragged_data().tensors
    assert sum(line["counted"] for line in steps) == 2 * batch_bodies.count_tokens((None, y))


def _step(*samples: int) -> list[tuple[MicroBatch, Any]]:
    micros = [MicroBatch(0, n, sum(samples), nth, nth == len(samples) - 1, nth) for nth, n in enumerate(samples)]
    return [(micro, torch.full((max(micro.samples, 1), 2), micro.nth)) for micro in micros]


def test_a_micro_batch_counts_by_its_parts_and_one_without_samples_by_nothing() -> None:
    # 0, 1 and 2 for each of two parts of a sample
    weighing = Weighing(1, ALONE, CPU, count=lambda batch: int(batch.sum()))
    [parts] = weighing.steps(iter(_step(3, 2, 1, 0)))
    assert [(part.counted, part.mean, part.each) for part in parts] == [(0, 0, 1), (4, 0.5, 1), (4, 0.5, 1), (0, 0, 1)]
    assert weighing.list_entries(weighing.list_numbers()) == {"counted": 8}


def test_a_step_of_nothing_has_no_loss_in_the_record(tmp_path: Path) -> None:
    model, data = nn.Linear(2, 1), TensorDataset(torch.ones(3, 2))
    with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
        model, optimizer = rt.wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        loader = rt.loader(DataLoader(data, 1), count=lambda _: rt.steps)
        rt.track(model=model, optimizer=optimizer)
        for (x,) in loader:
            optimizer.zero_grad()
            rt.backward(model(x).sum())
            optimizer.step()
    rows = hpcddp.load(str(tmp_path))
    assert [(row["counted"], row["loss"] is None) for row in rows] == [(0, True), (1, False), (2, False)]


@pytest.mark.parametrize("count", [-1, -0.5, math.nan, math.inf])
def test_a_count_that_is_negative_or_no_number_is_refused(count: float) -> None:
    with pytest.raises(RequestError, match=f"count= gave {count} for a micro batch of 1 sample"):
        list(Weighing(1, ALONE, CPU, count=lambda batch: count).steps(iter(_step(1))))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_count_may_be_a_sum_of_weights(slots: int) -> None:
    counts = iter([torch.tensor(0.1), 0.2, 0.3])
    weighing = Weighing(1, ALONE, CPU, count=lambda batch: next(counts), slots=slots)
    [parts] = weighing.steps(iter(_step(3, 2, 1)))
    assert [part.mean for part in parts] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert weighing.list_entries(weighing.list_numbers()) == {"counted": pytest.approx(0.6)}


def test_nan_never_reaches_gradients_that_count_for_nothing() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones_like(model.weight)
    with zeroed_gradients([model]):
        (model(torch.ones(1, 2)).sum() * 0 / torch.zeros(())).backward()
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
    assert torch.equal(model.bias.grad, torch.zeros_like(model.bias))
    model(torch.ones(1, 2)).sum().backward()
    assert float(model.bias.grad) == 1  # only inside


def _part(counted: float, mean: float) -> WeighedBatch:
    return WeighedBatch(MicroBatch(0, 3, 6, 0, True), None, counted, mean, 0.5)


def test_a_mean_over_nothing_is_refused_where_its_nan_would_reach_the_gradients() -> None:
    """Of a sharded model: torch has its whole parameters during a pass only."""
    nothing, part = torch.zeros((), requires_grad=True), _part(0, 0.0)
    with pytest.raises(RequestError, match="none of this micro batch's 3 samples has a part that counts"):
        run_backward(nothing / 0, part, [], summed=False)
    assert run_backward(nothing, part, [], summed=False) is None
    assert run_backward(nothing, part, [], summed=True) == 0.5
