"""What the loaders give."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.weighing import Weighing
from hpcddp.training.parallel.layout import Layout

from .conftest import Listening

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Draws from torch's generator, as augmentations do."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


def _loader(dataset: Dataset, world_size: int, rank: int, workers: int = 0) -> Listening:
    sampler = GlobalBatchSampler(len(dataset), plan_batch(8, world_size), rank, seed=1)
    weighing = Weighing(world_size, Layout(rank, world_size), CPU)
    return Listening(
        lambda ear: TrainingLoader(dataset, sampler, CPU, weighing, Reading(workers), ear, is_several=True)
    )


def test_the_weights_of_a_step_average_to_one_over_the_ranks() -> None:
    for world_size in (1, 2, 3, 5):
        loaders = [_loader(Noisy(), world_size, rank) for rank in range(world_size)]
        for alike in zip(*loaders, strict=True):
            assert sum(batch.mean for batch in alike) / world_size == pytest.approx(1.0, rel=1e-15)
            assert sum(batch.samples for batch in alike) == alike[0].total


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


def _evaluation(samples: int, batch: int, ranks: int, *, drop_last: bool = False) -> list[list[list[int]]]:
    """By rank, the samples of each batch."""
    data = TensorDataset(torch.arange(samples))
    layouts = [Layout(rank, ranks) for rank in range(ranks)]
    loaders = [EvaluationLoader(data, batch, layout, CPU, Reading(), drop_last=drop_last) for layout in layouts]
    found = [[x.tolist() for (x,) in loader] for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(batches) for batches in found]
    return found


@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_gives_each_sample_once_in_order_and_no_rank_more_than_its_share_of_a_batch(drop_last: bool) -> None:
    draw = random.Random(3)
    for _ in range(100):
        samples, batch, ranks = draw.randint(1, 60), draw.randint(1, 30), draw.randint(1, 9)
        batch = min(batch, samples) if drop_last else batch
        by_rank = _evaluation(samples, batch, ranks, drop_last=drop_last)
        rest = samples % batch if drop_last else 0
        assert [i for batches in by_rank for one in batches for i in one] == list(range(samples - rest))
        share = -(-batch // ranks)
        assert all(0 < len(one) <= share for batches in by_rank for one in batches)
        counts = {len(batches) for batches in by_rank}
        # uneven only where nothing else is possible: single samples, or fewer samples than ranks
        assert len(counts) == 1 or (share == 1 and (samples - rest) % ranks) or samples - rest < ranks


def test_evaluation_on_one_rank_has_the_batches_of_a_plain_data_loader() -> None:
    for samples, batch, drop_last in itertools.product((1, 7, 17, 32), (1, 4, 5), (False, True)):
        if samples >= batch:
            plain = DataLoader(TensorDataset(torch.arange(samples)), batch, drop_last=drop_last)
            assert _evaluation(samples, batch, 1, drop_last=drop_last) == [[x.tolist() for (x,) in plain]]


@pytest.mark.parametrize(("samples", "batch"), [(7, 3), (2, 9)])
def test_a_sharded_model_refuses_evaluation_with_fewer_batches_on_some_ranks(samples: int, batch: int) -> None:
    data = TensorDataset(torch.arange(samples))
    loader = EvaluationLoader(data, batch, Layout(0, 3), CPU, Reading(), forward_is_collective=lambda: True)
    with pytest.raises(RequestError, match="one batch less, and a sharded model needs all ranks") as refused:
        next(iter(loader))
    assert refused.value.hint == "batch_size=6 or more, and at least 3 samples; or fewer ranks"
