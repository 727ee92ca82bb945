"""`optimizer.zero_grad()` between two backward passes, which cannot drop the gradients of one pass alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import deviation, make_data, make_model, weights_of


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_gradients_that_are_to_be_cleared_between_two_backward_passes_do_not_stay_in_the_sum(
    micro_batch: int | None,
) -> None:
    model = make_model()
    before = weights_of(model)
    refused = pytest.raises(RequestError, match=r"zero_grad\(\) came between two rt\.backward\(loss\) of one micro")
    with nullcontext() if micro_batch is None else refused, hpcddp.runtime(6, max_micro_batch=micro_batch) as rt:
        model, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6)
        )
        for x, y in loader:
            optimizer.zero_grad()
            rt.backward(cross_entropy(model(x), y))
            optimizer.zero_grad()
            rt.backward(0 * cross_entropy(model(x), y))
            optimizer.step()
    assert deviation(weights_of(model), before) == 0


@pytest.mark.parametrize("detached", [True, False])
def test_another_optimizer_may_clear_gradients_that_this_micro_batch_did_not_reach(detached: bool) -> None:
    first, second = make_model(), torch.nn.Linear(3, 3).double()
    refused = pytest.raises(RequestError, match=r"zero_grad\(\) came between two rt\.backward\(loss\) of one micro")
    with nullcontext() if detached else refused, hpcddp.runtime(6, max_micro_batch=3) as rt:
        first, second, of_first, of_second, loader = rt.prepare(
            first,
            second,
            torch.optim.SGD(first.parameters(), lr=0.1),
            torch.optim.SGD(second.parameters(), lr=0.1),
            DataLoader(make_data(), batch_size=6),
        )
        for x, y in loader:
            of_first.zero_grad()
            of_second.zero_grad()
            made = first(x)
            rt.backward(cross_entropy(second(made.detach() if detached else made), y))
            of_first.zero_grad()
            rt.backward(cross_entropy(first(x), y))
            of_first.step()
            of_second.step()
