"""Mistakes in training loops, each a function that a user might have written, and what they are run with.

The ranks of one group make one mistake after the other. Each has a runtime of its own in the group.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError
from hpcddp.training.rendezvous.group import Group

Opened = Callable[..., Any]  # hpcddp.runtime in the ranks' group


def make_data(samples: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def make_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def prepared(rt: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = make_model()
    taken: tuple[nn.Module, torch.optim.Optimizer, Any] = rt.prepare(
        model, sgd(model), DataLoader(make_data(), batch_size=4)
    )
    return taken


def train(rt: Any, model: Any, optimizer: Any, loader: Any, *, epochs: int = 1) -> None:
    """A right loop over what it is given."""
    for _ in rt.epochs(epochs):
        for batch in loader:
            optimizer.zero_grad()
            for x, y in rt.micro_batches(batch):
                rt.backward(cross_entropy(model(x), y))
            optimizer.step()


# ---- weights that differ between the ranks


def weights_loaded_on_one_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        if rank == 1:
            rt.unwrap(model).load_state_dict(make_model(seed=9).state_dict())
        train(rt, model, optimizer, loader)


def weights_changed_on_one_rank_in_a_step(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                if rank == 1:
                    with torch.no_grad():
                        rt.unwrap(model)[2].bias.clamp_(max=-1.0)


def another_lr_on_one_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model = make_model()
        train(rt, *rt.prepare(model, sgd(model, lr=0.1 * (1 + rank)), DataLoader(make_data(), batch_size=4)))


def gradients_clipped_on_one_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                if rank == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()


def weights_changed_on_one_rank_late(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for epoch in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
            if epoch == 1 and rank == 0:
                nn.init.zeros_(rt.unwrap(model)[0].weight)


def train_with_average(open_: Opened, average: nn.Module, update: Callable[[Any, nn.Module, nn.Module], None]) -> None:
    with open_() as rt:
        model = make_model()
        model, average, optimizer, loader = rt.prepare(
            model, average, sgd(model), DataLoader(make_data(), batch_size=4)
        )
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                update(rt, average, model)


def an_average_updated_on_one_rank(open_: Opened, _rank: int) -> None:
    def update(rt: Any, average: Any, model: nn.Module) -> None:
        if rt.is_main:
            average.update_parameters(rt.unwrap(model))

    train_with_average(open_, AveragedModel(make_model()), update)


def an_average_by_hand_updated_on_one_rank(open_: Opened, _rank: int) -> None:
    def update(rt: Any, average: nn.Module, model: nn.Module) -> None:
        if rt.is_main:
            with torch.no_grad():
                for p, q in zip(average.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.5)

    train_with_average(open_, make_model().requires_grad_(False), update)


def a_teacher_loaded_on_one_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model, teacher = make_model(), make_model(seed=4).requires_grad_(False)
        model, teacher, *others = rt.prepare(model, teacher, sgd(model), DataLoader(make_data(), batch_size=4))
        if rank == 0:
            teacher.load_state_dict(make_model(seed=9).state_dict())
        train(rt, model, *others)


def weights_that_are_no_numbers(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y) * (torch.nan if rt.steps >= 2 else 1.0))
                optimizer.step()


def a_first_step_skipped_on_one_rank(open_: Opened, rank: int) -> None:
    skip_on_one_rank(open_, rank, 0)


def a_late_step_skipped_on_one_rank(open_: Opened, rank: int) -> None:
    skip_on_one_rank(open_, rank, 3)


def skip_on_one_rank(open_: Opened, rank: int, at: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                if rank == 0 or rt.steps != at:
                    optimizer.step()


def accumulation_by_hand(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for n, (x, y) in enumerate(loader):
                rt.backward(cross_entropy(model(x), y) / 2)
                if (n + 1) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


# ---- an evaluation on some ranks


def prepared_with_test(rt: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    model = make_model()
    test = DataLoader(make_data(), batch_size=3)
    taken: tuple[nn.Module, torch.optim.Optimizer, Any, Any] = rt.prepare(
        model, sgd(model), DataLoader(make_data(), batch_size=4), test
    )
    return taken


def an_evaluation_on_one_rank(open_: Opened, rank: int, **options: Any) -> None:
    with open_(**options) as rt:
        model, optimizer, loader, test = prepared_with_test(rt)
        train(rt, model, optimizer, loader)
        if rank == 0:
            assert sum(len(x) for x, _ in test) == 6


def an_evaluation_on_one_rank_after_the_last_checkpoint(open_: Opened, rank: int) -> None:
    an_evaluation_on_one_rank(open_, rank, run_dir="evaluated")


# ---- the bare model


def the_old_model_called(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model = make_model()
        _, optimizer, loader = rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4))
        train(rt, model, optimizer, loader)


def the_module_inside_called(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        train(rt, rt.unwrap(model), optimizer, loader)


def the_bare_model_called_with_accumulation(open_: Opened, _rank: int) -> None:
    with open_(max_micro_batch=1) as rt:
        model, optimizer, loader = prepared(rt)
        train(rt, rt.unwrap(model), optimizer, loader)


def the_bare_model_called_in_an_exact_run(open_: Opened, _rank: int) -> None:
    with open_(exact=True, slices=2) as rt:
        model, optimizer, loader = prepared(rt)
        train(rt, rt.unwrap(model), optimizer, loader)


def a_compiled_copy_of_the_bare_model_called(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        train(rt, torch.compile(rt.unwrap(model), backend="eager"), optimizer, loader)


def the_model_pickled(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, _, _ = prepared(rt)
        torch.save(rt.unwrap(model), io.BytesIO())
        torch.save(model, io.BytesIO())


# ---- gradients that DDP does not average


def two_forwards_then_two_backwards(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                first, second = cross_entropy(model(x), y), model(2 * x).square().mean()
                rt.backward(first)
                rt.backward(second)
                optimizer.step()


class TwoHeads(nn.Module):
    """Two layers; the second one is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, *, both: bool = False) -> Any:
        return (self.first(x), self.second(x)) if both else self.first(x)


def an_unused_layer(open_: Opened, _rank: int, **options: Any) -> None:
    with open_(**options) as rt:
        model = TwoHeads()
        train(rt, *rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4)))


def an_unused_layer_with_accumulation(open_: Opened, rank: int) -> None:
    an_unused_layer(open_, rank, max_micro_batch=1)


def an_unused_layer_in_an_exact_run(open_: Opened, rank: int) -> None:
    an_unused_layer(open_, rank, exact=True, slices=2)


def a_layer_replaced_after_prepare(open_: Opened, _rank: int, **options: Any) -> None:
    with open_() as rt:
        model = make_model()
        net, optimizer, loader = rt.prepare(
            rt.wrap(model, **options), sgd(model), DataLoader(make_data(), batch_size=4)
        )
        model[2] = nn.Linear(5, 3)
        train(rt, net, optimizer, loader)


def a_layer_replaced_where_some_may_be_unused(open_: Opened, rank: int) -> None:
    a_layer_replaced_after_prepare(open_, rank, find_unused_parameters=True)


def a_backward_pass_without_exchange(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for x, y in loader:
            with model.no_sync():
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()


def a_forward_pass_without_exchange(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for x, y in loader:
            with model.no_sync():
                loss = cross_entropy(model(x), y)
            rt.backward(loss)
            optimizer.step()


def passes_without_exchange_that_are_right(open_: Opened, _rank: int) -> None:
    """The next backward pass averages the gradients of both."""
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                with model.no_sync():
                    rt.backward(cross_entropy(model(x), y))
                rt.backward(cross_entropy(model(-x), y))
                optimizer.step()


def a_layer_unfrozen_after_prepare(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model = make_model()
        model[0].requires_grad_(False)
        net, optimizer, loader = rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4))
        for epoch in rt.epochs(4):
            model[0].requires_grad_(epoch > 0)
            for x, y in loader:
                assert rt.steps <= 3, "found late"
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(x), y))
                optimizer.step()


def a_layer_frozen_after_prepare(open_: Opened, _rank: int, **options: Any) -> None:
    with open_(**options) as rt:
        model = make_model()
        net, optimizer, loader = rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4))
        freeze_later(rt, model, net, optimizer, loader)


def a_layer_frozen_after_prepare_in_an_exact_run(open_: Opened, rank: int) -> None:
    a_layer_frozen_after_prepare(open_, rank, exact=True, slices=2)


def freeze_later(rt: Any, model: nn.Module, net: nn.Module, optimizer: Any, loader: Any) -> None:
    """From the second epoch on the first layer stays as it is."""
    for epoch in rt.epochs(3):
        model[0].requires_grad_(epoch < 1)
        frozen = model[0].weight.detach().clone()
        for batch in loader:
            optimizer.zero_grad()
            for x, y in rt.micro_batches(batch):
                rt.backward(cross_entropy(net(x), y))
            optimizer.step()
        assert torch.equal(frozen, model[0].weight) is (epoch > 0)


def a_group_added_after_prepare(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        shift = nn.Parameter(torch.zeros(3))
        for epoch in rt.epochs(2):
            if epoch == 1:
                optimizer.add_param_group({"params": [shift]})
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x) + shift, y))
                optimizer.step()


def a_layer_added_after_prepare(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        rt.unwrap(model).append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(rt.unwrap(model)[3].parameters())})
        train(rt, model, optimizer, loader)


# ---- one loss over batches of two loaders


def shares_that_are_not_in_proportion(open_: Opened, _rank: int, count: Any = None) -> None:
    with open_() as rt:
        model = make_model()
        first, second = (DataLoader(make_data(), batch_size=size, shuffle=True) for size in (3, 4))
        loader = rt.loader(first, count=count)
        net, optimizer, more = rt.prepare(model, sgd(model), second)
        for _ in rt.epochs(1):
            for (x, y), (u, v) in zip(loader, more, strict=False):
                optimizer.zero_grad()
                rt.backward(cross_entropy(net(torch.cat([x, u])), torch.cat([y, v])))
                optimizer.step()


def a_count_of_one_of_two_loaders(open_: Opened, rank: int) -> None:
    shares_that_are_not_in_proportion(open_, rank, count=lambda batch: len(batch[0]))


# ---- data that every rank does not get alike


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.full((4,), float(n)), n % 3) for n in range(24))


def a_data_set_that_is_cut_by_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model = make_model()
        train(rt, *rt.prepare(model, sgd(model), DataLoader(make_data(11 + rank), batch_size=4)))


def a_data_set_of_other_samples_by_rank(open_: Opened, rank: int) -> None:
    with open_() as rt:
        model = make_model()
        rows = Subset(make_data(24), range(rank, 24, 2))
        train(rt, *rt.prepare(model, sgd(model), DataLoader(rows, batch_size=4)))


# ---- what is right, and must not be refused


class Noisy(Dataset[Any]):
    """Draws random numbers of its own, on each rank others, and rounds on each rank otherwise."""

    def __init__(self, rank: int, *, draws: bool) -> None:
        self._data, self._rank, self._draws = make_data(), rank, draws
        self._own = random.Random(rank)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._data[index]
        noise = self._own.random() if self._draws else 1e-6 * self._rank
        return x + noise, y


def right_loops(open_: Opened, rank: int) -> None:
    """GANs whose models are not all called in a pass, frozen parts, compiled models, accumulation."""
    for options in ({}, {"max_micro_batch": 1}, {"exact": True, "slices": 2}):
        with open_(**options) as rt:
            train(rt, *prepared(rt), epochs=2)
    with open_() as rt:
        model, optimizer, loader = prepared(rt)
        train(rt, torch.compile(model, backend="eager"), optimizer, loader, epochs=2)
    with open_() as rt:
        model = make_model()
        train(rt, *rt.prepare(model, sgd(model), DataLoader(Numbers(), batch_size=4)))
    for draws in (True, False):
        with open_() as rt:
            model = make_model()
            noisy = Noisy(rank, draws=draws)
            train(rt, *rt.prepare(model, sgd(model), DataLoader(noisy, batch_size=4)))
    for options in ({}, {"max_micro_batch": 1}):
        with open_(**options) as rt:  # one loss is one backward pass, and so are losses of layers that share nothing
            model = TwoHeads()
            net, optimizer, loader = rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4))
            for _ in rt.epochs(2):
                for batch in loader:
                    optimizer.zero_grad(set_to_none=False)
                    for x, y in rt.micro_batches(batch):
                        rt.backward(sum(cross_entropy(out, y) for out in (*net(x, both=True), *net(-x, both=True))))
                        for out in net(x, both=True):
                            rt.backward(cross_entropy(out, y))
                    optimizer.step()
    for options in ({}, {"max_micro_batch": 1}, {"exact": True, "slices": 2}):
        with open_(**options) as rt:
            model = TwoHeads()
            optimizer = sgd(model)
            net = rt.wrap(model, find_unused_parameters=True)
            train(rt, *rt.prepare(net, optimizer, DataLoader(make_data(), batch_size=4)), epochs=2)
    for options in ({}, {"max_micro_batch": 1}, {"exact": True, "slices": 2}):
        with open_(**options) as rt:  # frozen later
            model = make_model()
            optimizer = sgd(model, momentum=0.9)
            net = rt.wrap(model, find_unused_parameters=True)
            freeze_later(rt, model, *rt.prepare(net, optimizer, DataLoader(make_data(), batch_size=4)))
    with open_() as rt:  # all ranks skip a step
        model, optimizer, loader = prepared(rt)
        for _ in rt.epochs(1):
            for x, y in loader:
                rt.backward(cross_entropy(model(x), y))
                if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1.0 and rt.steps:
                    optimizer.step()
                optimizer.zero_grad()
    train_with_average(
        open_, AveragedModel(make_model()), lambda rt, average, model: average.update_parameters(rt.unwrap(model))
    )
    with open_() as rt:  # a teacher that holds a frozen layer of the model
        model = make_model()
        teacher = nn.Sequential(model[0].requires_grad_(False))
        net, _, optimizer, loader = rt.prepare(model, teacher, sgd(model[2]), DataLoader(make_data(), batch_size=4))
        train(rt, net, optimizer, loader)
    with open_() as rt:  # evaluations that are left, and a look at one batch
        model, optimizer, loader, test = prepared_with_test(rt)
        for _ in rt.epochs(2):
            if rt.is_main:
                next(iter(test))
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
            for n, _ in enumerate(test):
                rt.save()
                if n == 1 or rank == 1:
                    break
        for _ in test:
            rt.save()
    with open_() as rt:  # frozen to the end, and a group of what the model had from the start
        model = make_model()
        model[0].requires_grad_(False)
        net, optimizer, loader = rt.prepare(model, sgd(model[0]), DataLoader(make_data(), batch_size=4))
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(rt, net, optimizer, loader, epochs=2)
    with open_(max_micro_batch=1) as rt:  # DDP lays its buckets out anew at the first call after their first use
        g, d, scaler = nn.Linear(4, 4), nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
        g, d, of_g, of_d, scaler, loader = rt.prepare(
            g, d, sgd(g), sgd(d), scaler, DataLoader(make_data(), batch_size=4)
        )
        for _ in rt.epochs(2):
            for batch in loader:
                of_d.zero_grad()
                for x, _ in rt.micro_batches(batch):
                    rt.backward((d(x) - d(g(x).detach())).square().mean(), scaler=scaler)
                scaler.step(of_d)
                of_g.zero_grad()
                for x, _ in rt.micro_batches(batch):
                    rt.backward(d(g(x)).square().mean(), scaler=scaler)
                scaler.step(of_g)
                scaler.update()
    with open_() as rt:
        g, d = nn.Linear(4, 4), nn.Linear(4, 1)
        g, d, of_g, of_d, loader = rt.prepare(g, d, sgd(g), sgd(d), DataLoader(make_data(), batch_size=4))
        for _ in rt.epochs(2):
            for x, _ in loader:
                of_d.zero_grad(set_to_none=False)
                with torch.no_grad():
                    made = g(x)
                rt.backward((d(x) - d(made)).square().mean())
                of_d.step()
                if rt.steps % 2:
                    of_g.zero_grad(set_to_none=False)
                    rt.backward(d(g(x)).square().mean())
                    of_g.step()


# ---- options that differ between the ranks


def _opened_with(open_: Opened, **options: Any) -> None:
    with open_(**options) as rt:
        train(rt, *prepared(rt))


def a_seed_of_its_own_on_each_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, seed=42 + rank)


def another_global_batch_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, global_batch=4 + rank)


def another_micro_batch_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, max_micro_batch=2 if rank == 0 else None)


def exact_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, exact=rank == 0)


def other_slices_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, exact=True, slices=8 if rank == 0 else 4)


def another_save_every_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, save_every=2 if rank == 0 else None)


def a_run_folder_on_one_rank(open_: Opened, rank: int) -> None:
    _opened_with(open_, run_dir="never-made" if rank == 0 else None)


def _loaded_with(open_: Opened, data: Any = None, **options: Any) -> None:
    model = make_model()
    with open_() as rt:
        loader = DataLoader(make_data(14) if data is None else data, **{"batch_size": 4} | options)
        train(rt, *rt.prepare(model, sgd(model), loader))


def shuffled_on_one_rank(open_: Opened, rank: int) -> None:
    _loaded_with(open_, shuffle=rank == 0)


def cut_on_one_rank(open_: Opened, rank: int) -> None:
    _loaded_with(open_, drop_last=rank == 1)


def another_batch_size_on_one_rank(open_: Opened, rank: int) -> None:
    _loaded_with(open_, batch_size=4 + 2 * rank)


def _evaluated_with(open_: Opened, data: Any, batch_size: int = 4) -> None:
    model = make_model()
    with open_() as rt:
        *objects, _ = rt.prepare(model, sgd(model), DataLoader(make_data(), 4), DataLoader(data, batch_size))
        train(rt, *objects)


def another_batch_size_of_evaluation_on_one_rank(open_: Opened, rank: int) -> None:
    _evaluated_with(open_, make_data(), 4 + 2 * rank)


def evaluation_data_that_are_cut_by_rank(open_: Opened, rank: int) -> None:
    _evaluated_with(open_, make_data(7 + rank))


def evaluation_data_of_other_samples_by_rank(open_: Opened, rank: int) -> None:
    _evaluated_with(open_, Subset(make_data(), [rank, 2 + rank, 4 + rank]))


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_data())


def another_batch_size_of_a_stream_on_one_rank(open_: Opened, rank: int) -> None:
    _loaded_with(open_, Rows(), batch_size=4 + 2 * rank)


def options_that_one_rank_may_have_otherwise(open_: Opened, rank: int) -> None:
    """Those that only rank 0 uses; and a batch_size that says nothing, beside both numbers that it would say."""
    model = make_model()
    with open_(keep_checkpoints=2 + rank, log_to=[], global_batch=4, max_micro_batch=2, timeout_s=600.0 + rank) as rt:
        train(rt, *rt.prepare(model, sgd(model), DataLoader(make_data(), batch_size=4 + 2 * rank, num_workers=rank)))


class Queue(nn.Sequential):
    """Keeps what it has seen in a buffer, on each rank something else."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.register_buffer("alike", torch.zeros(2))
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue.copy_(x[0])
        out: Tensor = super().forward(x)
        return out


def a_queue_in_a_buffer(open_: Opened, _rank: int) -> None:
    with open_() as rt:
        model = Queue()
        model, optimizer, loader, test = rt.prepare(
            model, sgd(model), DataLoader(make_data(), batch_size=4), DataLoader(make_data(), batch_size=3)
        )
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
            for _ in test:
                pass


def request_of_one_rank(open_: Opened, rank: int) -> None:
    """After the batches of an epoch one rank's request ends the loop of all, as of rank 0, which has the accuracy."""
    for nth, how in enumerate(("stop", "finish_early")):
        epochs = []
        with open_() as rt:
            model, optimizer, loader = prepared(rt)
            for epoch in rt.epochs(3):
                epochs.append(epoch)
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(cross_entropy(model(x), y))
                    optimizer.step()
                if rank == nth:
                    getattr(rt, how)("good enough")
        assert (epochs, rt.steps) == ([0], 3)
        assert rt.stop_reason == ("good enough" if how == "stop" else None)


def make_mistakes(argument: list[Any]) -> None:
    """[folder, names]: each rank writes what became of each mistake: the error's two lines, or that there was none."""
    folder, names = argument
    os.chdir(folder)
    said: dict[str, str] = {}
    with hpcddp.init() as group:

        def opened(**options: Any) -> Any:
            return hpcddp.runtime(**{"group": group} | options)

        for name in names:
            said[name] = _try(globals()[name], opened, group)
    Path(folder, f"{group.rank}.json").write_text(json.dumps(said))


def _try(mistake: Callable[[Opened, int], None], opened: Opened, group: Group) -> str:
    try:
        mistake(opened, group.rank)
    except HpcddpError as error:
        return f"{error}"
    return "nothing was said"
