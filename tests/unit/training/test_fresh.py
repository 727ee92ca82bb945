"""Which optimizers have not stepped yet, though some have a state."""

from __future__ import annotations

import torch
from torch import nn

from hpcddp.training.parallel.zero import is_fresh, replace_parameters


def test_an_optimizer_is_fresh_until_it_steps_whatever_its_constructor_keeps() -> None:
    layer = nn.Linear(2, 3)
    adagrad = torch.optim.Adagrad(layer.parameters(), lr=0.1, initial_accumulator_value=0.5)
    plain = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    assert is_fresh(adagrad)
    assert is_fresh(plain)
    plain.state["k"] = 7  # type: ignore[index]  # as Lookahead and others keep a number of no parameter
    assert not is_fresh(plain)
    layer(torch.ones(1, 2)).sum().backward()
    adagrad.step()
    assert not is_fresh(adagrad)


def test_the_state_follows_the_parameters_that_take_the_place_of_others() -> None:
    layer, other = nn.Linear(2, 3), nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adagrad(layer.parameters(), lr=0.1, initial_accumulator_value=0.5)
    replace_parameters(optimizer, {id(layer.weight): other})
    assert optimizer.param_groups[0]["params"] == [other, layer.bias]
    assert {*optimizer.state} == {other, layer.bias}
    assert optimizer.state[other]["sum"].tolist() == [0.5] * 6
