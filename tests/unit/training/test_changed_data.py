"""Data that do not stay as they are while a run trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
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


@pytest.mark.parametrize("samples", [3, 6])
def test_a_data_set_that_has_another_length_in_a_later_epoch_is_refused(samples: int) -> None:
    data = Growing()

    def change(epoch: int) -> None:
        data.samples = samples if epoch else 4

    with pytest.raises(RequestError) as error:
        train(DataLoader(data, batch_size=2), change)
    error.match(rf"this Growing has {samples} samples now, and had 4 when its loader was made[\s\S]*\nhint: .* new run")


def test_evaluation_data_that_have_grown_are_refused() -> None:
    data = Growing()
    with hpcddp.runtime() as rt:
        loader = rt.evaluation_loader(data, 2)
        assert len(list(loader)) == 2
        data.samples = 6
        with pytest.raises(RequestError, match="this Growing has 6 samples now, and had 4 when"):
            list(loader)


class Given(IterableDataset[Any]):
    """The iterator that `give` returns in each pass."""

    def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
        self._give = give

    def __iter__(self) -> Iterator[Any]:
        return self._give()


class Rewound(IterableDataset[Any]):
    """Its own iterator, from the start again in each pass."""

    def __iter__(self) -> Rewound:
        self._next = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self._next == 4:
            raise StopIteration
        self._next += 1
        return torch.ones(1)


ROWS = [torch.ones(1)] * 4


@pytest.mark.parametrize(
    ("rows", "kind"), [((row for row in ROWS), "generator"), (map(abs, ROWS), "map"), (islice(ROWS, 4), "islice")]
)
def test_a_stream_that_can_be_gone_through_once_only_is_refused(rows: Iterator[Any], kind: str) -> None:
    with pytest.raises(RequestError) as error:
        train(DataLoader(Given(lambda: rows), batch_size=2), lambda _: None)
    error.match(
        rf"the __iter__ of this Given returns the same {kind} again[\s\S]*\nhint: make a new iterator in __iter"
    )


@pytest.mark.parametrize("data", [Given(lambda: (row for row in ROWS)), Given(lambda: iter(ROWS)), Rewound()])
def test_a_stream_that_begins_anew_in_each_epoch_is_right(data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(DataLoader(data, batch_size=2), lambda _: None) == [[1.0] * 4] * 2
    assert "warning" not in capsys.readouterr().err
