"""What a loop does by hand, and would do for a part of the global batch: it is refused, or said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import hpcddp
from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.data.randomness import WorkerStart
from hpcddp.training.gate.unprepared import find_renormed
from hpcddp.training.remarks import warn_of_hooks

from .toy_loop import Toy, make_data, make_model, prepare_toy

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
        assert warning.startswith("0.weight and 1 more parameters: a hook on the gradient sees")
    handle.remove()
    with hpcddp.runtime(**SPLIT) as rt:
        rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=6))
    assert "hpcddp: warning: 2.weight: a hook on the gradient sees" in capsys.readouterr().err


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


def decay(toy: Toy, rt: Any, nth: int) -> None:
    with torch.no_grad():
        for parameter in toy.model.parameters():
            parameter.mul_(0.99)


def decay_data(toy: Toy, rt: Any, nth: int) -> None:
    toy.model[0].weight.data.mul_(0.99)


def decay_in_the_last(toy: Toy, rt: Any, nth: int) -> None:
    if rt.is_last_micro_batch:
        decay(toy, rt, nth)


def clamp_and_restore(toy: Toy, rt: Any, nth: int) -> None:
    """As for a look at the model with other weights."""
    kept = [parameter.detach().clone() for parameter in toy.model.parameters()]
    decay(toy, rt, nth)
    with torch.no_grad():
        for parameter, old in zip(toy.model.parameters(), kept, strict=True):
            parameter.copy_(old)


def warm_up(toy: Toy, rt: Any, nth: int) -> None:
    toy.optimizer.param_groups[0]["lr"] = 0.01 * (nth + 1)


def warm_up_by_steps(toy: Toy, rt: Any, nth: int) -> None:
    toy.optimizer.param_groups[0]["lr"] = 0.01 * (rt.steps + 1)


def warm_up_in_the_last(toy: Toy, rt: Any, nth: int) -> None:
    if rt.is_last_micro_batch:
        warm_up_by_steps(toy, rt, nth)


def normalise(toy: Toy, rt: Any, nth: int) -> None:
    with torch.no_grad():
        toy.model[0].weight.div_(toy.model[0].weight.norm(dim=1, keepdim=True))


Act = Callable[[Toy, Any, int], None]


def run_with(act: Act, *, before: bool, options: dict[str, Any]) -> None:
    with hpcddp.runtime(**options) as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(1):
            for nth, (x, y) in enumerate(toy.loader):
                if before:
                    act(toy, rt, nth)
                toy.step(rt, x, y)
                if not before:
                    act(toy, rt, nth)


@pytest.mark.parametrize(
    ("act", "before", "what"),
    [
        (decay, False, "weights"),
        (decay, True, "weights"),
        (decay_data, False, "weights"),
        (warm_up, True, "a learning rate"),
        (warm_up, False, "a learning rate"),
    ],
)
def test_weights_and_rates_that_are_changed_in_each_micro_batch_are_refused(act: Act, before: bool, what: str) -> None:
    with pytest.raises(RequestError, match=f"the loop changed {what} between two micro batches"):
        run_with(act, before=before, options=SPLIT)
    run_with(act, before=before, options={})


@pytest.mark.parametrize(
    ("act", "before"),
    [
        (decay_in_the_last, True),
        (decay_in_the_last, False),
        (clamp_and_restore, False),
        (warm_up_by_steps, True),
        (warm_up_in_the_last, True),
        (warm_up_in_the_last, False),
        (normalise, True),
    ],
)
def test_what_is_changed_once_per_global_batch_is_right(act: Act, before: bool) -> None:
    run_with(act, before=before, options=SPLIT)


def lookups(layer: nn.Module, samples: int, *, bounded_by_hand: bool = False) -> Tensor:
    """The weights of this embedding after two epochs, all rows bounded."""
    torch.manual_seed(3)
    tokens = torch.randint(12, (12, 3), generator=torch.Generator().manual_seed(7))
    nn.init.normal_(layer.weight)
    net = nn.Sequential(layer, nn.Linear(8, 12))

    def bound() -> None:
        with torch.no_grad():
            layer.weight.renorm_(2, 0, 1.0)

    with hpcddp.runtime(6, max_micro_batch=samples) as rt:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        model, optimizer, loader = rt.prepare(net, optimizer, DataLoader(TensorDataset(tokens), batch_size=6))
        for _ in rt.epochs(2):
            if bounded_by_hand:
                bound()
            for (rows,) in loader:
                rt.backward(cross_entropy(model(rows).flatten(0, -2), rows.flatten()))
                if rt.step(optimizer) and bounded_by_hand:
                    bound()
    bound()
    return layer.weight.detach()


def test_an_embedding_that_bounds_its_rows_is_right_with_accumulation_and_refused_on_several_ranks() -> None:
    whole = lookups(nn.Embedding(12, 8, max_norm=1.0), 6)
    for layer in (nn.Embedding(12, 8, max_norm=1.0), nn.Embedding(12, 8)):
        assert torch.allclose(lookups(layer, 2, bounded_by_hand=layer.max_norm is None), whole, atol=1e-6)
    tied = nn.Sequential(nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 12))
    assert find_renormed(tied, 1) == {id(tied[0].weight)}
    tied[1].weight = tied[0].weight
    assert find_renormed(tied, 1) == set()
    bag = nn.Sequential(nn.EmbeddingBag(12, 8, max_norm=2.0), nn.Linear(8, 12))
    with pytest.raises(RequestError, match=r"0, an EmbeddingBag with max_norm=2, changes .*\nhint: max_norm=None, "):
        find_renormed(bag, 2)
    assert find_renormed(nn.Embedding(2, 2), 2) == set()


class Uneven(Dataset):
    """Every third target is left out of the loss; or, `evenly`, the last of two in each sample."""

    def __init__(self, evenly: bool) -> None:
        self.evenly = evenly

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        left_out = (False, True) if self.evenly else (index % 5 == 0, index % 3 == 0)
        targets = [-100 if out else index % 3 for out in left_out]
        return torch.full((2, 4), index / 12, dtype=torch.float64), torch.tensor(targets)


def count_targets(batch: Any) -> int:
    return int((batch[1] != -100).sum())


Loss = Callable[[Tensor, Tensor], Tensor]


def warnings_of(loss: Loss, capsys: Any, *, evenly: bool = False, options: dict[str, Any] = SPLIT, **more: Any) -> str:
    with hpcddp.runtime(6, **options) as rt:
        model = make_model()
        loader = rt.loader(Uneven(evenly), count=more.get("count"))
        model, optimizer = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in rt.epochs(1):
            for x, y in loader:
                rt.backward(loss(model(x).flatten(0, 1), y.flatten()), summed=more.get("summed", False))
                rt.step(optimizer)
    return "".join(line for line in capsys.readouterr().err.splitlines(keepends=True) if "warning" in line)


def test_a_sum_and_a_mean_over_other_parts_than_samples_are_named_where_the_batch_is_split(capsys: Any) -> None:
    def summed(scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores, y, reduction="sum")

    def squared(scores: Tensor, y: Tensor) -> Tensor:
        return mse_loss(scores, torch.zeros_like(scores), reduction="sum")

    class_weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def weighted(scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores, y.clamp(min=0), weight=class_weights)

    for loss in (summed, squared):
        assert warnings_of(loss, capsys).count("the loss is a sum") == 1
        assert warnings_of(loss, capsys, summed=True) == ""
        assert warnings_of(loss, capsys, options={}) == ""
    for loss in (cross_entropy, weighted):
        assert warnings_of(loss, capsys).count("more or fewer parts in one micro batch") == 1
        assert warnings_of(loss, capsys, options={}) == ""
    assert warnings_of(cross_entropy, capsys, evenly=True) == ""
    assert warnings_of(cross_entropy, capsys, count=count_targets) == ""
