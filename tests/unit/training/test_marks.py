"""What became of a gradient is seen without reading a number of it."""

from __future__ import annotations

import gc
import itertools
import weakref

import torch
from torch import nn

from hpcddp.training.marks import SPREAD, Mark, mark_all, spread


def test_a_mark_tells_a_change_in_place_another_tensor_and_none_at_all_apart() -> None:
    weight = nn.Parameter(torch.ones(3))
    mark = Mark(weight)
    assert mark.holds()
    assert not mark.was_changed()
    assert mark_all([weight]) == []
    weight.sum().backward()
    assert not mark.holds()  # there was none
    (mark,) = mark_all([nn.Parameter(torch.ones(1)), weight])
    assert mark.parameter is weight
    assert mark.holds()
    weight.grad = weight.grad.clone()  # the old one is freed, and the new one may get its id
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
    weight.sum().backward()
    assert not mark.holds()  # another tensor, in the same place perhaps


def test_a_mark_keeps_no_gradient_from_being_freed_and_knows_it_as_long_as_it_lives() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.sum().backward()
    mark = Mark(weight)
    gone = weakref.ref(weight.grad)
    gc.collect()  # python's object of the gradient is held by torch only
    assert mark.holds()
    weight.grad = None
    assert gone() is None
    assert not mark.holds()


def test_marks_are_spread_over_all_parameters_with_the_first_and_the_last() -> None:
    for count in (1, SPREAD, SPREAD + 1, 100, 1000):
        parameters = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
        places = [next(n for n, p in enumerate(parameters) if p is chosen) for chosen in spread(parameters)]
        assert len(places) == len(set(places)) == min(count, SPREAD)
        assert (places[0], places[-1]) == (0, count - 1)
        gaps = [b - a for a, b in itertools.pairwise(places)]
        assert not gaps or max(gaps) - min(gaps) <= 1
