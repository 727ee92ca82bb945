"""A DataLoader is taken over only if the runtime reads the samples that it would have read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import SecondLoader
from hpcddp.training.data.reading import read_how

DATA = TensorDataset(torch.arange(24.0)[:, None])


class FirstThree(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1, 2] * 8)


class NextEpoch(DistributedSampler[Any]):
    """Chooses as its base class does."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch + 1)


class Scaled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([2 * x for x in batch] for batch in super().__iter__())


class Named(DataLoader[Any]):
    """Reads as torch's."""

    name = "train"


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def spread(data: Any) -> DistributedSampler[Any]:
    return DistributedSampler(data, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (DataLoader(DATA, 8, sampler=FirstThree(DATA, num_replicas=2, rank=0)), "DataLoader with a FirstThree"),
        (DataLoader(DATA, 8, sampler=SequentialSampler(range(12))), "DataLoader with a SequentialSampler"),
        (DataLoader(DATA, 8, sampler=spread(range(12))), "DataLoader with a DistributedSampler"),
        (Scaled(DATA, 8), "Scaled with a SequentialSampler"),
    ],
    ids=["distributed", "in order", "distributed over others", "loader"],
)
def test_what_chooses_or_changes_the_samples_itself_is_refused(loader: DataLoader[Any], names: str) -> None:
    with pytest.raises(RequestError, match=f"the {names} chooses or changes samples itself"):
        read_how(loader)


@pytest.mark.parametrize(
    ("loader", "shuffle", "is_share"),
    [
        (DataLoader(DATA, 8), False, False),
        (DataLoader(DATA, 8, sampler=SequentialSampler(range(24))), False, False),
        (DataLoader(DATA, 8, sampler=spread(DATA)), True, True),
        (DataLoader(DATA, 8, sampler=NextEpoch(DATA, num_replicas=2, rank=1, shuffle=False)), False, True),
        (Named(DATA, 8, shuffle=True), True, False),
        (Named(Rows(), 8), False, False),
    ],
    ids=["in order", "a range", "distributed", "a subclass", "a loader's subclass", "a stream"],
)
def test_what_chooses_them_as_torch_does_is_taken_over(loader: DataLoader[Any], shuffle: bool, is_share: bool) -> None:
    how = read_how(loader)
    assert (how.batch_size, how.shuffle, how.is_share) == (8, shuffle, is_share)


@pytest.mark.parametrize(("shuffle", "kind"), [(True, SecondLoader), (False, EvaluationLoader)])
def test_a_loader_after_the_first_is_training_data_if_it_is_shuffled(shuffle: bool, kind: type) -> None:
    with hpcddp.runtime() as rt:
        _, second = rt.prepare(DataLoader(DATA, 8, shuffle=True), DataLoader(DATA, 8, shuffle=shuffle))
    assert type(second) is kind
