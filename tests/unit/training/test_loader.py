"""What the loaders give."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hpcddp.batchplan import plan_batch
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader, move
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.parallel.layout import plan_layout

from .conftest import Listening, unheard

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Draws from torch's generator, as augmentations do."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


def _loader(dataset: Dataset, world_size: int, rank: int, workers: int = 0) -> Listening:
    sampler = GlobalBatchSampler(len(dataset), plan_batch(8, world_size), rank, seed=1)
    weighing = Weighing(world_size, plan_layout(rank, world_size), CPU)
    return Listening(
        lambda ear: TrainingLoader(dataset, sampler, CPU, weighing, Reading(workers), ear, unheard(), is_several=True)
    )


def test_the_weights_of_a_step_average_to_one_over_the_ranks() -> None:
    for world_size in (1, 2, 3, 5):
        loaders = [_loader(Noisy(), world_size, rank) for rank in range(world_size)]
        for alike in zip(*loaders, strict=True):
            assert sum(batch.weight.mean for batch in alike) / world_size == pytest.approx(1.0, rel=1e-15)
            assert sum(batch.samples for batch in alike) == alike[0].total


def test_a_sample_is_augmented_alike_on_any_rank_and_in_any_worker() -> None:
    def drawn(world_size: int, workers: int) -> dict[int, list[float]]:
        batches = [b for rank in range(world_size) for b in _loader(Noisy(), world_size, rank, workers)]
        return {int(i): x.tolist() for b in batches for x, i in zip(b.x[: b.samples], b.y[: b.samples], strict=True)}

    expected = drawn(1, 0)
    assert len(expected) == 30
    assert drawn(3, 0) == expected
    assert drawn(2, 2) == expected


def test_workers_that_outlive_an_epoch_draw_in_the_next_what_no_workers_draw() -> None:
    def drawn(world_size: int, workers: int) -> dict[tuple[int, int], list[float]]:
        loaders = [_loader(Noisy(), world_size, rank, workers) for rank in range(world_size)]
        found = {}
        for epoch in range(2):
            for batch in (batch for loader in loaders for batch in loader):
                for x, i in zip(batch.x[: batch.samples].tolist(), batch.y.tolist(), strict=False):
                    found[epoch, i] = x
            for loader in loaders:
                loader.sampler.end_epoch(epoch)
        return found

    expected = drawn(1, 0)
    assert len(expected) == 60
    assert all(expected[0, i] != expected[1, i] for i in range(30))
    assert drawn(3, 1) == expected
    assert drawn(1, 2) == expected


def test_reading_data_leaves_the_generators_of_the_loop_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(_loader(Noisy(), 1, 0))
    assert torch.equal(torch.rand(1), expected)


def test_the_next_epoch_has_another_order() -> None:
    loader = _loader(Noisy(), 1, 0)
    first = [i for batch in loader for i in batch.y.tolist()]
    loader.sampler.end_epoch(0)
    second = [i for batch in loader for i in batch.y.tolist()]
    assert sorted(first) == sorted(second)
    assert first != second


def test_evaluation_loaders_hold_every_sample_once_in_order() -> None:
    data = TensorDataset(torch.arange(17), torch.arange(17))
    for world_size in (1, 2, 3, 20):
        loaders = [
            EvaluationLoader(data, 4, plan_layout(rank, world_size), CPU, Reading()) for rank in range(world_size)
        ]
        assert [i for loader in loaders for x, _ in loader for i in x.tolist()] == list(range(17))
        assert len({len(loader) for loader in loaders}) == (2 if world_size == 20 else 1)


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


def test_nested_samples_are_moved_with_their_shape() -> None:
    moved = move({"p": Pair(torch.ones(1), "text"), "l": [torch.ones(2), (torch.ones(3),)]}, torch.device("meta"))
    assert moved["p"].a.is_meta
    assert moved["p"].b == "text"
    assert moved["l"][0].is_meta
    assert isinstance(moved["l"][1], tuple)
