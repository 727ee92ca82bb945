"""What rt.prepare takes over, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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


def prepare_wrongly(what: str) -> None:
    data, model = make_data(), make_model()
    with hpcddp.runtime(global_batch=None if what in ("no batch", "one by one") else 4) as rt:
        if what == "weighted":
            rt.prepare(DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)))
        elif what == "replacement":
            rt.prepare(DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)))
        elif what == "own batches":
            rt.prepare(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]))
        elif what == "no batches":
            rt.prepare(DataLoader(data, batch_size=None))
        elif what == "cut stream":
            rt.prepare(DataLoader(Endless(), batch_size=4, drop_last=True))
        elif what == "too little":
            rt.prepare(DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True))
        elif what == "data set":
            rt.prepare(data)
        elif what == "number":
            rt.prepare(7)
        elif what == "nothing":
            rt.prepare()
        elif what == "parallel":
            rt.prepare(nn.DataParallel(model))
        elif what == "foreign":
            rt.prepare(model, torch.optim.SGD(make_model().parameters(), lr=0.1))
        elif what == "twice":
            rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            rt.prepare(make_model())
        elif what == "one by one":
            rt.prepare(model)
        elif what == "no loader":
            rt.prepare(model)
            next(iter(rt.epochs(1)))
        elif what == "no batch":
            rt.loader(data)
        elif what == "workers twice":
            rt.loader(DataLoader(data, batch_size=4), num_workers=2)
        elif what == "two models":
            rt.prepare(model, make_model())
            rt.save_model("model.pt")
        elif what == "evaluation of a number":
            rt.evaluation_loader(3)  # type: ignore[arg-type]  # as given
        elif what == "outside":
            rt.backward(torch.zeros((), requires_grad=True))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weighted", "a sampler of its own, WeightedRandomSampler"),
        ("replacement", "a sampler of its own, RandomSampler"),
        ("own batches", "a batch_sampler of its own"),
        ("no batches", "batch_size=None"),
        ("cut stream", "drop_last does not go with a stream"),
        ("too little", "drop_last leaves none"),
        ("data set", "was given a data set"),
        ("number", "was given a int"),
        ("nothing", "was given nothing"),
        ("parallel", "in DataParallel already"),
        ("foreign", "4 of the parameters of a SGD belong to no model that rt.prepare was given"),
        ("twice", r"(?s)tracks its objects already.*rt.prepare\(model, optimizer, loader\): all of them in one call"),
        (
            "one by one",
            r"(?s)no global batch was given.*rt.prepare\(model, optimizer, loader\): all of them in one call",
        ),
        ("no loader", "no training loader yet"),
        ("no batch", "no global batch was given"),
        ("workers twice", "num_workers came with a DataLoader"),
        ("two models", "which of 2 models"),
        ("evaluation of a number", "a int is no data set\nhint: rt.loader.dataset., rt.evaluation_loader"),
        ("outside", "outside the loop over the training loader"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_in_words(what: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare_wrongly(what)


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
