"""What rt.prepare takes over, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.prepare import name_objects

from .toy_loop import SAMPLES, make_data, make_model


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(8, 2))


DATA, MODEL = make_data(), make_model()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_twice(rt: Any) -> None:
    rt.prepare(MODEL, sgd(MODEL))
    rt.prepare(make_model())


def train_without_a_loader(rt: Any) -> None:
    rt.prepare(MODEL)
    next(iter(rt.epochs(1)))


def save_one_of_two(rt: Any) -> None:
    rt.prepare(MODEL, make_model())
    rt.save_model("model.pt")


IN_ONE_CALL = r"rt.prepare\(model, optimizer, loader\): all of them in one call"
TOO_LITTLE = DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True)
REFUSED: list[tuple[int | None, Callable[[Any], object], str]] = [
    (
        4,
        lambda rt: rt.prepare(DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))),
        "Weighted",
    ),
    (4, lambda rt: rt.prepare(DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True))), "chooses or"),
    (4, lambda rt: rt.prepare(DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])), "makes its own batches"),
    (4, lambda rt: rt.prepare(DataLoader(Endless(), 4, drop_last=True)), "drop_last does not go with a stream"),
    (4, lambda rt: rt.prepare(TOO_LITTLE), "has 3 samples, and a global batch 4"),
    (4, lambda rt: rt.prepare(DATA), "was given a TensorDataset, which has no state_dict"),
    (4, lambda rt: rt.prepare(7), "was given a int"),
    (4, lambda rt: rt.prepare(nn.DataParallel(MODEL)), "in DataParallel already"),
    (
        4,
        lambda rt: rt.prepare(MODEL, sgd(make_model())),
        "4 of the parameters of a SGD belong to no model that rt.prep",
    ),
    (4, prepare_twice, rf"(?s)tracks its objects already.*{IN_ONE_CALL}"),
    (None, lambda rt: rt.prepare(MODEL), rf"(?s)no global batch was given.*{IN_ONE_CALL}"),
    (4, train_without_a_loader, "no training loader yet"),
    (None, lambda rt: rt.loader(DATA), "no global batch was given"),
    (4, save_one_of_two, "which of 2 models"),
    (4, lambda rt: rt.evaluation_loader(3), "a int is no data set\nhint: rt.loader.dataset., rt.evaluation_loader"),
]


@pytest.mark.parametrize(("batch", "wrong", "message"), REFUSED, ids=[f"{nth}" for nth in range(len(REFUSED))])
def test_what_cannot_be_taken_over_is_refused_in_words(
    batch: int | None, wrong: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(RequestError, match=message), hpcddp.runtime(batch) as rt:
        wrong(rt)


def test_the_dataloaders_batch_size_is_the_global_batch_if_nothing_else_says_it() -> None:
    for options, expected in (
        ({}, "6 = 1 rank x 6 x 1"),
        ({"global_batch": 12}, "12 = 1 rank x 12 x 1"),
        ({"max_micro_batch": 4}, "6 = 1 rank x 3 x 2"),
    ):
        with hpcddp.runtime(**options) as rt:
            rt.prepare(DataLoader(make_data(), batch_size=6))
            assert str(rt.plan) == expected


def test_a_dataloader_is_taken_over_with_its_order_its_collate_function_and_its_end() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "names": [f"{int(y)}" for _, y in samples]}

    model = make_model()
    with hpcddp.runtime() as rt:
        given = DataLoader(make_data(), batch_size=6, collate_fn=collate, drop_last=True)
        _, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
        seen = []
        for _ in rt.epochs(2):
            for batch in loader:
                seen.append(batch)
                rt.backward(model(batch["x"]).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) == 6  # 20 = 3 * 6 + 2, twice
    assert torch.equal(torch.cat([batch["x"] for batch in seen[:3]]), make_data().tensors[0][:18])
    assert seen[0]["names"] == [f"{int(y)}" for y in make_data().tensors[1][:6]]


def test_a_shuffled_dataloader_without_its_last_batch_leaves_other_samples_out_each_epoch() -> None:
    model = nn.Linear(1, 1)
    with hpcddp.runtime(seed=1) as rt:
        given = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=4, shuffle=True, drop_last=True)
        _, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), given)
        seen: list[set[float]] = []
        for _ in rt.epochs(6):
            seen.append(set())
            for (x,) in loader:
                seen[-1] |= set(x.flatten().tolist())
                rt.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert {len(epoch) for epoch in seen} == {8}
    assert set.union(*seen) == set(range(10))


def test_objects_are_named_by_kind_and_order() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = [model, optimizer, make_model(), scheduler, torch.amp.GradScaler("cpu")]
    assert list(name_objects(things)) == ["model", "optimizer", "model_2", "scheduler", "scaler"]


@dataclasses.dataclass
class Words:
    ids: Tensor
    text: str


def test_a_batch_may_be_a_dataclass() -> None:
    from hpcddp.training.data.loader import move

    moved = move(Words(torch.ones(2), "two"), torch.device("meta"))
    assert moved.ids.is_meta
    assert moved.text == "two"
