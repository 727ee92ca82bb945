"""The gradient noise scale, against one that is known; and that measuring it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hpcddp.batchplan import plan_batch
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight
from hpcddp.training.gradient.noise import NoiseMeter, describe_noise, split_square

RunRanks = Callable[..., Any]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_any_split_finds_the_true_noise_scale_and_leaves_every_bit_of_the_gradients(
    run_ranks: RunRanks, batch_bodies: ModuleType, tmp_path: Path, world_size: int
) -> None:
    accumulated = {"max_micro_batch": 32}  # on one rank there has to be something to compare
    cases = {
        "measured": {"noise_every": 1, "run_dir": str(tmp_path / "run")} | accumulated,
        "exact": {"noise_every": 1, "exact": "integer", "slices": 8},
        "sometimes": {"noise_every": 5} | accumulated,
        "never": accumulated,
    }
    arguments = {
        name: {"options": options, "out": str(tmp_path / name), "epochs": 1 if name in ("sometimes", "never") else 3}
        | ({"lr": 0.01} if name in ("sometimes", "never") else {})
        for name, options in cases.items()
    }
    run_ranks("batch_bodies:measure_noise", world_size, list(arguments.values())).check()
    found = {name: torch.load(tmp_path / name) for name in cases}
    truth = batch_bodies.true_noise_scale()
    assert 300 < truth < 500
    for name in ("measured", "exact"):
        assert found[name]["scale"] == pytest.approx(truth, rel=0.1), (name, truth)
    assert found["never"]["scale"] is None
    pairs = zip(found["never"]["gradients"], found["sometimes"]["gradients"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    [metrics] = (tmp_path / "run").glob("attempts/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "step"]
    assert steps[-1]["noise_scale"] == found["measured"]["scale"]


def test_the_estimate_is_the_papers_for_equal_micro_batches() -> None:
    small, large, b, pieces = 3.0, 1.0, 64, 4  # |g_b|^2 and |g_B|^2
    big = b * pieces
    noise, signal = split_square(small, large, pieces, big)
    assert noise == pytest.approx((small - large) / (1 / b - 1 / big))
    assert signal == pytest.approx((big * large - b * small) / (big - b))


def _micro(last: bool) -> MicroBatch:
    return MicroBatch(0, 4, 8, int(last), last)


def test_a_second_backward_pass_over_the_same_parameters_makes_the_step_unmeasurable() -> None:
    model = nn.Linear(2, 1)
    meter = NoiseMeter(1, True, 1)
    meter.watch(model)
    half = Weight(4, 0.5, 0.125)
    for step, passes in enumerate([1, 2]):
        for last in (False, True):
            meter.start(half, step)
            for _ in range(passes):
                model(torch.ones(1, 2)).sum().backward()
            meter.collect(_micro(last), half, step)
        sums = {name: float(value) for name, value in meter.take(step).items()}
        assert ("noise_scale" in meter.learn(sums, 8)) is (passes == 1)


def test_nothing_is_hooked_on_steps_that_are_not_measured() -> None:
    model = nn.Linear(2, 1)
    for meter, step in ((NoiseMeter(None, True, 1), 0), (NoiseMeter(3, True, 1), 1)):
        meter.watch(model)
        meter.start(Weight(4, 1.0, 0.25), step)
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        assert meter.take(step) == {}


def test_a_plan_of_one_micro_batch_per_step_is_told_that_nothing_can_be_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    NoiseMeter(1, True, 1).check(plan_batch(9, 1))
    assert "this plan has one; set max_micro_batch=5 or less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (
            5123.0,
            "gradient noise scale about 5,100 samples; global batch 256: a batch of up to about 5,100 still saves",
        ),
        (390.0, "about as large as it should be"),
        (12.3, "about 12 samples; global batch 256: a larger batch saves hardly any steps"),
    ],
)
def test_the_scale_is_told_as_advice(scale: float, words: str) -> None:
    assert words in describe_noise(scale, 256)


def test_without_a_measurement_nothing_is_told() -> None:
    assert describe_noise(None, 256) is None
