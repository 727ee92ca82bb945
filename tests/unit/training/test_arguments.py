"""An argument that cannot be meant ends a script in two lines, by its name; what can be meant is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.arguments import (
    read_names,
    read_optional,
    read_path,
    read_timeout,
    read_value,
    read_whole,
)


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        ({"global_batch": "8"}, "global_batch='8'): '8' is not a whole number of 1 or more", "global_batch=1)"),
        ({"max_micro_batch": 0}, "max_micro_batch=0): 0 is not a whole number of 1 or more", "max_micro_batch=1)"),
        ({"save_every": 0}, "save_every=0): 0 is not", "save_every=1)"),
        (
            {"save_every": "often"},
            "save_every='often'): 'often' is neither",
            "save_every='10m')",
        ),
        ({"seed": "a"}, "seed='a'): 'a' is not a whole number of 0 or more", "seed=1)"),
        ({"seed": -1}, "seed=-1): -1 is not a whole number of 0 or more", "seed=1)"),
        ({"timeout_s": "60"}, "timeout_s='60'): '60' is no number of seconds", "timeout_s=1800)"),
        ({"run_dir": 5}, "run_dir=5): 5 is no path", "run_dir='runs/train')"),
        ({"exact": True, "slices": "8"}, "slices='8')", "slices=1)"),
    ],
    ids=str,
)
def test_an_argument_of_the_runtime_is_read_before_anything_begins(given: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(RequestError) as told:
        hpcddp.runtime(**given)
    assert says in told.value.message
    assert told.value.hint.startswith("hpcddp.runtime(")
    assert told.value.hint.endswith(hint)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (
            lambda: read_whole("3", "rt.epochs({})", least=0),
            "'3' is not a whole number of 0 or more\nhint: rt.ep",
        ),
        (lambda: read_whole(None, "rt.epochs({})"), "rt.epochs(None): None is not a whole number"),
        (lambda: read_whole(2.5, "rt.epochs({})"), "2.5 is not a whole number of 1 or more\nhint: rt.epochs(1)"),
        (
            lambda: read_value("x", "rt.save_best({})"),
            "rt.save_best('x'): 'x' is not one number\nhint: rt.save_best(0.5)",
        ),
        (lambda: read_value(torch.ones(2), "f({})"), "f(a Tensor): a Tensor is not one number"),
    ],
)
def test_an_argument_of_a_method_is_read_alike(read: Callable[[], Any], says: str) -> None:
    with pytest.raises(RequestError) as told:
        read()
    assert says in str(told.value)


def test_the_arguments_of_init_are_read_alike() -> None:
    with pytest.raises(RequestError, match=r"^hpcddp\.init\(timeout_s=-1\): -1 is no number of seconds"):
        hpcddp.init(timeout_s=-1)


def test_what_is_used_without_with_is_not_open_yet() -> None:
    for opening, hint in ((hpcddp.init(), "init(…) as group"), (hpcddp.runtime(), "runtime(…) as rt")):
        with pytest.raises(RequestError) as told:
            opening.prepare  # type: ignore[attr-defined]  # noqa: B018
        assert str(told.value).endswith(f"(…) is not open yet\nhint: with hpcddp.{hint}:")


def test_an_unknown_way_to_rank_0_is_refused() -> None:
    for call in (hpcddp.init, hpcddp.runtime):
        with pytest.raises(
            RequestError, match=r"rendezvous='x'\): there is no such one\nhint: one of auto, env, file, mpi4py"
        ):
            call(rendezvous="x")


def test_what_can_be_meant_is_taken() -> None:
    assert [read_whole(value, "{}") for value in (8, numpy.int64(8), torch.tensor(8))] == [8] * 3
    assert (read_optional(None, "{}"), read_whole(0, "{}", least=0)) == (None, 0)
    assert [read_value(value, "{}") for value in (1, numpy.float32(1), torch.ones(1), numpy.array(1.0))] == [1.0] * 4
    assert (read_names("lr"), read_names(["lr", "seed"])) == (("lr",), ("lr", "seed"))
    assert [read_path(value, "{}") for value in (None, "a/b", Path("a/b"))] == [None, "a/b", "a/b"]
    assert (read_timeout(None, "{}"), read_timeout(60, "{}")) == (None, 60.0)


def test_the_methods_read_their_arguments() -> None:
    model, data = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    with hpcddp.runtime() as rt:
        rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for method, value in itertools.product(("epochs", "batches", "save_best"), ("", None, [])):
            with pytest.raises(RequestError, match=rf"^rt\.{method}\("):
                list(getattr(rt, method)(value))
        with pytest.raises(RequestError, match=r"^rt\.evaluation_loader\(dataset, '2'\): '2' is not a whole"):
            rt.evaluation_loader(data, "2")
