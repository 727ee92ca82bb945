"""What a loop does by hand, and would do for a part of the global batch: it is refused, or said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, get_worker_info

import hpcddp
from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.data.randomness import WorkerStart
from hpcddp.training.remarks import warn_of_hooks

from .toy_loop import make_data, make_model, prepare_toy

SPLIT: dict[str, Any] = {"max_micro_batch": 2}


@pytest.mark.parametrize("options", [{}, SPLIT], ids=str)
def test_an_average_that_was_not_prepared_is_refused_in_the_loop(options: dict[str, Any]) -> None:
    def run() -> None:
        with hpcddp.runtime(**options) as rt:
            toy = prepare_toy(rt)
            average = AveragedModel(toy.model)
            average.update_parameters(toy.model)  # not in the loop
            for _ in rt.epochs(1):
                for x, y in toy.loader:
                    toy.step(rt, x, y)
                    average.update_parameters(toy.model)

    with pytest.raises(RequestError, match="AveragedModel averages a prepared model, and was not prepared"):
        run()
    own = nn.Linear(1, 1)
    AveragedModel(own).update_parameters(own)


def test_an_average_of_another_model_is_its_owners_affair() -> None:
    other = make_model()
    average = AveragedModel(other)
    with hpcddp.runtime(**SPLIT) as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(1):
            for x, y in toy.loader:
                toy.step(rt, x, y)
                average.update_parameters(other)
    assert int(average.n_averaged) == 10


def test_hooks_on_gradients_are_named_where_they_see_a_part_of_the_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, whole, split = make_model(), plan_batch(6, 1), plan_batch(6, 1, 2)
    assert warn_of_hooks(model, split, 2) is None
    handle = model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    model[2].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert warn_of_hooks(model, whole, 1) is None
    assert warn_of_hooks(model, None, 1) is None
    for plan, ranks in ((split, 1), (whole, 2)):
        warning = warn_of_hooks(model, plan, ranks)
        assert warning is not None
        assert warning.startswith("0.weight and 1 more has a hook on its gradient")
    handle.remove()
    with hpcddp.runtime(**SPLIT) as rt:
        rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6))
    assert "hpcddp: warning: 2.weight has a hook on its gradient" in capsys.readouterr().err


class Shifted(Dataset):
    """Its worker_init_fn says by how much."""

    shift = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + self.shift


def shift_by_seven(_worker: int) -> None:
    get_worker_info().dataset.shift = 7


def test_a_worker_init_fn_sees_the_data_set() -> None:
    batches = DataLoader(Shifted(), batch_size=4, num_workers=1, worker_init_fn=shift_by_seven)
    with hpcddp.runtime() as rt:
        loader = rt.loader(batches)
        assert next(iter(loader._read())).content.tolist() == [7, 8, 9, 10]
        loader.close()
    WorkerStart(None)(0)  # in no worker: nothing to see
