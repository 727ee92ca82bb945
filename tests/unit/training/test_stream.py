"""Streams: every sample once per epoch, whatever the ranks, the stops and the workers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.stream import StreamSampler
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.parallel.layout import Layout

from .conftest import Listening

RunRanks = Callable[..., Any]
CPU = torch.device("cpu")


class Plain(IterableDataset):
    """Shuffles with the global generator, which people do, and draws at each sample; no length, no skip."""

    def __init__(self, length: int) -> None:
        self.samples = length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for i in torch.randperm(self.samples).tolist():
            yield torch.rand(2), i


class Sized(Plain):
    def __len__(self) -> int:
        return self.samples


class Skipping(Iterator[tuple[torch.Tensor, int]]):
    def __init__(self, samples: list[int]) -> None:
        self._samples = samples

    def __next__(self) -> tuple[torch.Tensor, int]:
        if not self._samples:
            raise StopIteration
        return torch.rand(2), self._samples.pop(0)

    def skip(self, count: int) -> int:
        before = len(self._samples)
        del self._samples[:count]
        return before - len(self._samples)


class Skips(IterableDataset):
    """Its iterator can skip; the order follows the epoch, and the length is not known."""

    epoch = 0

    def __init__(self, length: int) -> None:
        self.samples = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Skipping:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch))
        return Skipping(order.tolist())


KINDS = {"plain": Plain, "sized": Sized, "skips": Skips}
Seen = Counter[tuple[int, int]]


def _loader(dataset: Any, plan: Any, rank: int, at: tuple[int, int] = (0, 0), workers: int = 0) -> Listening:
    sampler = StreamSampler(dataset, plan, rank, seed=3)
    sampler.epoch, sampler.position = at
    weighing = Weighing(plan.data_size, Layout(rank, plan.data_size), CPU)
    return Listening(
        lambda ear: TrainingLoader(dataset, sampler, CPU, weighing, Reading(workers), ear, is_several=True)
    )


def _go(loaders: list[Listening], epochs: int, steps: int, seen: Seen, draws: dict[Any, Any]) -> None:
    """Train on all ranks, one step each in turn, until so many epochs are over or so many steps made."""
    made = 0
    while (epoch := loaders[0].sampler.epoch) < epochs and made < steps:
        for alike in zip(*(_steps(loader) for loader in loaders), strict=True):
            assert len({step[0].total for step in alike}) == 1
            assert loaders[0].sampler.plan.slices is not None or len({len(step) for step in alike}) == 1
            assert sum(b.samples for step in alike for b in step) == alike[0][0].total
            for batch in (b for step in alike for b in step):
                for x, i in zip(batch.x[: batch.samples].tolist(), batch.y.tolist(), strict=False):
                    seen[epoch, i] += 1
                    assert draws.setdefault((epoch, i), x) == x
            for loader in loaders:
                loader.sampler.advance(alike[0][0].micro)
            made += 1
            if made == steps:
                return
        for loader in loaders:
            loader.sampler.end_epoch(epoch)


def _steps(loader: Listening) -> Iterator[list[Any]]:
    step = []
    for batch in loader:
        step.append(batch)
        if batch.last:
            yield step
            step = []


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.integers(1, 60),
    global_batch=st.integers(1, 16),
    segments=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 9), st.integers(1, 8)), max_size=4),
    slices=st.booleans(),
)
def test_a_chain_of_runs_on_changing_world_sizes_sees_every_sample_of_a_stream_once_per_epoch(
    kind: str, length: int, global_batch: int, segments: list[tuple[int, int, int]], slices: bool
) -> None:
    seen: Seen = Counter()
    draws: dict[Any, Any] = {}
    at = (0, 0)
    for world_size, largest, steps in [*segments, (1, 10**6, 10**6)]:
        try:
            plan = plan_batch(global_batch, world_size, largest, global_batch if slices else None)
        except RequestError:
            continue
        loaders = [_loader(KINDS[kind](length), plan, rank, at) for rank in range(world_size)]
        _go(loaders, 2, steps, seen, draws)
        [at] = {(loader.sampler.epoch, loader.sampler.position) for loader in loaders}
    assert at == (2, 0)
    assert seen == Counter((epoch, i) for epoch in range(2) for i in range(length))


def _drawn(dataset: Any, world_size: int, workers: int) -> list[Any]:
    """(sample, what was drawn at it), in the order of training."""
    plan = plan_batch(7, world_size)
    loaders = [_loader(dataset, plan, rank, workers=workers) for rank in range(world_size)]
    found = []
    for epoch in range(2):
        for alike in zip(*loaders, strict=True):
            for batch in alike:
                found += list(zip(batch.y[: batch.samples].tolist(), batch.x.tolist(), strict=False))
            for loader in loaders:
                loader.sampler.advance(alike[0].micro)
        for loader in loaders:
            loader.sampler.end_epoch(epoch)
    return found


@pytest.mark.parametrize("kind", ["plain", "skips"])
def test_order_and_draws_are_the_same_on_any_rank_and_in_any_worker(kind: str) -> None:
    expected = _drawn(KINDS[kind](24), 1, 0)
    assert len(expected) == 2 * 24
    assert expected[:24] != expected[24:]
    assert _drawn(KINDS[kind](24), 3, 0) == expected
    assert _drawn(KINDS[kind](24), 2, 1) == expected
    assert _drawn(KINDS[kind](24), 1, 2) == expected


def test_reading_a_stream_leaves_the_generators_of_the_loop_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    list(_loader(Plain(9), plan_batch(4, 2), 1))
    assert (torch.rand(1), random.random()) == expected


@pytest.mark.parametrize("dataset", [Sized(0), Plain(0)])
def test_an_empty_stream_is_refused(dataset: Any) -> None:
    with pytest.raises(RequestError, match="empty"):
        _go([_loader(dataset, plan_batch(3, 1), 0)], 1, 9, Counter(), {})


@pytest.mark.parametrize("kind", ["sized", "skips"])
@pytest.mark.parametrize("length", [12, 14])
def test_the_last_batch_of_a_stream_is_known_as_such_when_it_comes(kind: str, length: int) -> None:
    for world_size, workers in ((1, 0), (3, 0), (2, 1)):
        plan = plan_batch(6, world_size, 1)
        for rank in range(world_size):
            micros = [batch.micro for batch in _loader(KINDS[kind](length), plan, rank, workers=workers)]
            assert [one.ends_epoch for one in micros] == [one.position >= 12 - 6 * (length == 12) for one in micros]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("skips", "plain")])
def test_a_stream_resumes_over_four_two_and_three_real_ranks(
    run_ranks: RunRanks, batch_bodies: ModuleType, tmp_path: Path, kind: str
) -> None:
    for world_size, steps in ((4, 3), (2, 3), (3, None)):
        argument = {"kind": kind, "run_dir": str(tmp_path / "run"), "steps": steps, "folder": str(tmp_path)}
        run_ranks("batch_bodies:train_stream", world_size, argument).check()
    seen = [json.loads(line) for path in tmp_path.glob("*.seen") for line in path.read_text().splitlines()]
    assert sorted(map(tuple, seen)) == batch_bodies.sorted_stream(2)
    assert json.loads((tmp_path / "run" / "state.json").read_text())["status"] == "finished"
