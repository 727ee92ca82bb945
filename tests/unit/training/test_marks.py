"""What became of a gradient is seen without reading a number of it."""

from __future__ import annotations

import torch
from torch import nn

from hpcddp.training.marks import Mark, mark_first


def test_a_mark_tells_a_change_in_place_another_tensor_and_none_at_all_apart() -> None:
    weight = nn.Parameter(torch.ones(3))
    mark = Mark(weight)
    assert mark.holds()
    assert not mark.was_changed()
    assert mark_first([weight]) is None
    weight.sum().backward()
    assert not mark.holds()  # there was none
    mark = mark_first([nn.Parameter(torch.ones(1)), weight])
    assert mark is not None
    assert mark.parameter is weight
    assert mark.holds()
    weight.grad = weight.grad.clone()
    assert not mark.holds()
    assert not mark.was_changed()
    mark = Mark(weight)
    (2 * weight).sum().backward()
    assert not mark.holds()
    assert mark.was_changed()
    mark = Mark(weight)
    weight.grad = None
    assert not mark.holds()
    assert mark.was_changed()
