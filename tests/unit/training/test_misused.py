"""What a script does with the runtime that is not in its words is answered in two lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import make_data, make_model, prepare_toy


def test_the_loader_and_the_runtime_say_what_a_script_asks_of_a_data_loader_and_a_group() -> None:
    with hpcddp.runtime(max_micro_batch=2) as rt:
        loader = prepare_toy(rt).loader
        assert loader.batch_size == 6
        assert (rt.rank, rt.world_size) == (0, 1)
    with hpcddp.runtime(6) as rt:
        assert rt.loader(make_data()).batch_size == 6


def test_a_loop_over_another_loader_than_the_first_says_that_the_first_is_the_training_data() -> None:
    model = make_model()
    test, train = (DataLoader(make_data(), batch_size=6) for _ in range(2))

    def run(model: nn.Module, train: Any) -> None:
        with hpcddp.runtime() as rt:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, _, train = rt.prepare(model, optimizer, test, train)
            for _ in rt.epochs(1):
                for x, _ in train:
                    rt.backward(model(x).sum())

    with pytest.raises(RequestError, match=r"the loader that rt\.prepare returned for its first"):
        run(model, train)
