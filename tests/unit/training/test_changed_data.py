"""Data that do not stay as they are while a run trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hpcddp
from hpcddp.errors import RequestError


class Growing(Dataset[Any]):
    """`samples` numbers, which are all `scale`."""

    def __init__(self) -> None:
        self.samples, self.scale = 4, 1.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), self.scale)


def train(data: Any, change: Any, epochs: int = 2) -> list[list[float]]:
    """Calls `change(epoch)` before each epoch; returns the samples of each."""
    seen = []
    model = torch.nn.Linear(1, 1)
    with hpcddp.runtime() as rt:
        model, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for epoch in rt.epochs(epochs):
            change(epoch)
            seen.append([])
            for x in loader:
                seen[-1] += x[:, 0].tolist()
                optimizer.zero_grad()
                rt.backward(model(x).mean())
                optimizer.step()
    return seen


@pytest.mark.parametrize(("stay", "second"), [(False, 2.0), (True, 1.0)])
def test_workers_stay_from_epoch_to_epoch_only_where_the_dataloader_says_so(stay: bool, second: float) -> None:
    data = Growing()

    def change(epoch: int) -> None:
        data.scale = 1.0 + epoch

    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=stay)
    assert train(loader, change) == [[1.0] * 4, [second] * 4]


def test_a_data_set_that_has_another_length_in_a_later_epoch_is_refused() -> None:
    data = Growing()

    def change(epoch: int) -> None:
        data.samples = 3 if epoch else 4

    with pytest.raises(RequestError) as error:
        train(DataLoader(data, batch_size=2), change)
    error.match(r"this Growing has 3 samples now, and had 4 when its loader was made[\s\S]*\nhint: .* new run")


class Given(IterableDataset[Any]):
    """The iterator that `give` returns in each pass."""

    def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
        self._give = give

    def __iter__(self) -> Iterator[Any]:
        return self._give()


ROWS = [torch.ones(1)] * 4


def test_a_stream_that_can_be_gone_through_once_only_is_refused_and_one_that_begins_anew_is_right() -> None:
    assert train(DataLoader(Given(lambda: iter(ROWS)), batch_size=2), lambda _: None) == [[1.0] * 4] * 2
    rows = iter(ROWS)
    with pytest.raises(RequestError, match=r"the stream of epoch 1 is empty[\s\S]*each __iter__ begins anew"):
        train(DataLoader(Given(lambda: rows), batch_size=2), lambda _: None)
