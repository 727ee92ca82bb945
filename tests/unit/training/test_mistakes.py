"""Each row of the table of mistakes has a loop that makes it: the error has the row's two lines. What trains rightly
is refused nothing, and no mistake of several ranks goes unsaid."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training import mistakes
from hpcddp.training.mistakes import MISTAKES, Mistake

from .toy_loop import CLASSES, make_data, make_model

RunRanks = Callable[..., Any]
SPLIT: dict[str, Any] = {"max_micro_batch": 2}
EXACT: dict[str, Any] = {"exact": True, "slices": 2}


class Parts(NamedTuple):
    """What a loop has."""

    rt: Any
    model: Any
    optimizer: Any
    loader: Any
    scaler: Any

    def loss(self, x: Any, y: Any) -> torch.Tensor:
        return cross_entropy(self.model(x), y)

    def backward(self, batch: Any) -> None:
        """All of a batch."""
        self.rt.train_step(batch, lambda micro: self.loss(*micro))


Loop = Callable[[Parts], None]


def run(loop: Loop, *, scales: bool = False, leaves_out: str = "", **options: Any) -> Parts:
    """The loop, with batches of 6, 6, 6 and 2 samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    objects = {"model": model, "optimizer": optimizer, "scaler": scaler}
    with hpcddp.runtime(**options) as rt:
        given = [thing for name, thing in objects.items() if name != leaves_out]
        *_, loader = rt.prepare(*given, DataLoader(make_data(), batch_size=6))
        parts = Parts(rt, model, optimizer, loader, scaler)
        loop(parts)
    return parts


# ---- one function for each mistake that one rank can make


def unpacks(p: Parts) -> None:
    for x, y in p.loader:
        p.rt.backward(p.loss(x, y))


def indexes(p: Parts) -> None:
    for batch in p.loader:
        p.rt.backward(p.loss(batch[0], batch[1]))


def counts(p: Parts) -> None:
    for batch in p.loader:
        len(batch)


def asks_for_a_field(p: Parts) -> None:
    for batch in p.loader:
        batch.x.cuda()


def backward_before_the_loop(p: Parts) -> None:
    p.rt.backward(p.loss(*make_data()[:6]))


def backward_behind_the_loop(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
        p.optimizer.step()
        p.optimizer.zero_grad()
    p.rt.backward(p.loss(*make_data()[:6]))


def backward_outside_the_micro_batches(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            loss = p.loss(x, y)
        p.rt.backward(loss)


def the_batch_before(p: Parts) -> None:
    before = None
    for batch in p.loader:
        p.backward(batch if before is None else before)
        p.optimizer.step()
        p.optimizer.zero_grad()
        before = batch


def leaves_the_first_out(p: Parts) -> None:
    for batch in p.loader:
        for nth, (x, y) in enumerate(p.rt.micro_batches(batch)):
            if nth > 0:
                p.rt.backward(p.loss(x, y))
        p.optimizer.step()


def leaves_the_last_out(p: Parts) -> None:
    for batch in p.loader:
        for nth, (x, y) in enumerate(p.rt.micro_batches(batch)):
            if nth < 1:
                p.rt.backward(p.loss(x, y))
        p.optimizer.step()


def breaks_off_and_takes_the_next(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.rt.backward(p.loss(x, y))
            break


def no_backward(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.loss(x, y)


def of_a_copy(p: Parts) -> None:
    for x, y in p.loader:
        p.rt.backward(p.loss(x, y), of=x.clone())


def one_micro_loop_in_another(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            for u, v in p.rt.micro_batches(batch):
                p.rt.backward(p.loss(x, y) + p.loss(u, v))


def zeroed_in_the_micro_loop(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.optimizer.zero_grad()
            p.rt.backward(p.loss(x, y))
        p.optimizer.step()


def zeroed_in_place_in_the_micro_loop(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.model.zero_grad(set_to_none=False)
            p.rt.backward(p.loss(x, y))
        p.optimizer.step()


def clipped_in_the_micro_loop(p: Parts) -> None:
    for batch in p.loader:
        p.optimizer.zero_grad()
        for x, y in p.rt.micro_batches(batch):
            p.rt.backward(p.loss(x, y))
            nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        p.optimizer.step()


def a_hook_that_steps(p: Parts) -> None:
    last = next(iter(p.model.parameters()))
    hook = last.register_post_accumulate_grad_hook(lambda _: p.optimizer.step())
    try:
        for batch in p.loader:
            p.backward(batch)
    finally:
        hook.remove()


def an_optimizer_of_its_own_that_steps_in_a_hook(p: Parts) -> None:
    first = next(iter(p.model.parameters()))
    own = torch.optim.SGD([first], lr=0.1)
    first.register_post_accumulate_grad_hook(lambda _: own.step())
    for batch in p.loader:
        p.backward(batch)


def step_in_the_micro_loop(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.rt.backward(p.loss(x, y))
            p.optimizer.step()


def two_steps(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
        p.optimizer.step()
        p.optimizer.step()


def plain_backward(p: Parts) -> None:
    for batch in p.loader:
        for x, y in p.rt.micro_batches(batch):
            p.optimizer.zero_grad()
            p.loss(x, y).backward()
        p.optimizer.step()


def goes_on_after_a_failed_step(p: Parts) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("in the middle of a step")

    p.optimizer.register_step_post_hook(fail)
    for batch in p.loader:
        p.backward(batch)
        with suppress(ValueError):
            p.optimizer.step()


def zeroed_before_the_step(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
        p.optimizer.zero_grad()
        p.optimizer.step()


def goes_on_behind_a_step_that_broke(p: Parts) -> None:
    def breaks(*_: Any) -> None:
        raise KeyError

    p.optimizer.register_step_post_hook(breaks)
    for batch in p.loader:
        p.backward(batch)
        with contextlib.suppress(KeyError):
            p.optimizer.step()


def accumulates_by_hand(p: Parts) -> None:
    for n, batch in enumerate(p.loader):
        p.backward(batch)
        if n % 2:
            p.optimizer.step()
            p.optimizer.zero_grad()


def skips_without_clearing(p: Parts) -> None:
    for n, batch in enumerate(p.loader):
        p.backward(batch)
        if nn.utils.clip_grad_norm_(p.model.parameters(), 0.1) and n != 1:
            p.optimizer.step()
            p.optimizer.zero_grad()


def steps_behind_the_loop(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
    p.optimizer.step()


def never_steps(p: Parts) -> None:
    for batch in p.loader:
        p.optimizer.zero_grad()
        p.backward(batch)


def trains(p: Parts) -> None:
    """Rightly."""
    for batch in p.loader:
        p.optimizer.zero_grad()
        p.backward(batch)
        p.optimizer.step()


def a_scheduler_of_its_own(p: Parts) -> None:
    torch.optim.lr_scheduler.StepLR(p.optimizer, 1)
    trains(p)


def backward_with_a_scaler(p: Parts) -> None:
    for x, y in p.loader:
        p.rt.backward(p.loss(x, y), scaler=p.scaler)


def scaled_by_hand(p: Parts) -> None:
    for x, y in p.loader:
        p.rt.backward(p.scaler.scale(p.loss(x, y)))


def adds_a_group(p: Parts) -> None:
    shift = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
    p.optimizer.add_param_group({"params": [shift]})
    for batch in p.loader:
        p.rt.train_step(batch, lambda micro: cross_entropy(p.model(micro[0]) + shift, micro[1]))
        p.optimizer.step()


def unfreezes(p: Parts) -> None:
    for batch in p.loader:
        p.model[0].requires_grad_(True)
        p.backward(batch)
        p.optimizer.step()


def epochs_twice(p: Parts) -> None:
    for _ in range(2):
        for _ in p.rt.epochs(2):
            trains(p)


def steps_twice(p: Parts) -> None:
    for _ in range(2):
        for batch in p.rt.batches(3):
            p.optimizer.zero_grad()
            p.backward(batch)
            p.optimizer.step()


def over_other_data(p: Parts) -> None:
    for _ in p.rt.epochs(2):
        for x, y in DataLoader(make_data(), batch_size=6):
            p.loss(x, y).backward()


def epochs_by_hand(p: Parts) -> None:
    for _ in range(2):
        trains(p)


def two_loops_in_an_epoch(p: Parts) -> None:
    for _ in p.rt.epochs(2):
        trains(p)
        trains(p)


ON_ONE_RANK: list[tuple[Loop, dict[str, Any], Mistake, dict[str, Any]]] = [
    *((loop, SPLIT, mistakes.BATCH_UNPACKED, {}) for loop in (unpacks, indexes, counts, asks_for_a_field)),
    (unpacks, EXACT, mistakes.BATCH_UNPACKED, {}),
    (unpacks, {"max_micro_batch": 6}, mistakes.BATCH_UNPACKED, {}),  # also where the share fits
    (backward_before_the_loop, {}, mistakes.BACKWARD_OUTSIDE, {"when": ""}),
    (backward_behind_the_loop, {}, mistakes.BACKWARD_OUTSIDE, {"when": " (it was over)"}),
    (backward_behind_the_loop, SPLIT, mistakes.BACKWARD_OUTSIDE, {"when": " (it was over)"}),
    (backward_outside_the_micro_batches, SPLIT, mistakes.MICRO_LOOP_MISSING, {}),
    (backward_outside_the_micro_batches, {"max_micro_batch": 6}, mistakes.MICRO_LOOP_MISSING, {}),
    (backward_outside_the_micro_batches, EXACT, mistakes.MICRO_LOOP_MISSING, {}),
    (the_batch_before, SPLIT, mistakes.OTHER_BATCH, {}),
    (leaves_the_first_out, SPLIT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": 1, "all": 2}),
    (leaves_the_last_out, EXACT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": 1, "all": 2}),
    (breaks_off_and_takes_the_next, SPLIT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": "some", "all": 3}),
    *((no_backward, options, mistakes.BATCH_WITHOUT_BACKWARD, {"beside": ""}) for options in ({}, SPLIT, EXACT)),
    *(
        (loop, options, mistakes.GRADIENTS_CHANGED, {})
        for loop in (zeroed_in_the_micro_loop, zeroed_in_place_in_the_micro_loop, clipped_in_the_micro_loop)
        for options in (SPLIT, EXACT)
    ),
    (of_a_copy, {}, mistakes.OF_UNKNOWN, {}),
    (one_micro_loop_in_another, SPLIT, mistakes.MICRO_LOOPS_MIXED, {}),
    (a_hook_that_steps, {}, mistakes.STEP_IN_BACKWARD, {"kind": "SGD"}),
    (an_optimizer_of_its_own_that_steps_in_a_hook, SPLIT, mistakes.STEP_IN_BACKWARD, {"kind": "SGD"}),
    (step_in_the_micro_loop, SPLIT, mistakes.STEP_EARLY, {"kind": "SGD"}),
    (step_in_the_micro_loop, {"max_micro_batch": 6}, mistakes.STEP_EARLY, {"kind": "SGD"}),
    *((two_steps, options, mistakes.STEP_AGAIN, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((plain_backward, options, mistakes.STEP_AGAIN, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((goes_on_after_a_failed_step, options, mistakes.STEP_LEFT, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((zeroed_before_the_step, options, mistakes.STEP_ON_CLEARED, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    (goes_on_behind_a_step_that_broke, {}, mistakes.STEP_LEFT, {"kind": "SGD"}),
    *((accumulates_by_hand, options, mistakes.STEP_ON_SEVERAL, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((skips_without_clearing, options, mistakes.STEP_ON_SEVERAL, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((steps_behind_the_loop, options, mistakes.STEP_ON_SEVERAL, {"kind": "SGD"}) for options in ({}, SPLIT, EXACT)),
    *((never_steps, options, mistakes.NEVER_STEPPED, {"batches": 4}) for options in ({}, SPLIT, EXACT)),
    (
        trains,
        {"leaves_out": "optimizer"},
        mistakes.STEP_NOT_PREPARED,
        {"kind": "SGD", "hint": "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers"},
    ),
    (a_scheduler_of_its_own, {}, mistakes.SCHEDULER_NOT_PREPARED, {"kind": "SGD"}),
    (backward_with_a_scaler, {"scales": True, "leaves_out": "scaler"}, mistakes.SCALER_NOT_PREPARED, {}),
    (scaled_by_hand, {"scales": True}, mistakes.SCALER_MISSING, {}),
    (adds_a_group, {}, mistakes.PARAMETERS_FOREIGN, {"count": 1, "kind": "SGD"}),
    (trains, {"leaves_out": "model"}, mistakes.PARAMETERS_FOREIGN, {"count": 4, "kind": "SGD"}),
    (epochs_twice, {}, mistakes.NO_EPOCH_LEFT, {"count": 2, "most": 2, "over": 2, "more": 4}),
    (steps_twice, {}, mistakes.NO_STEP_LEFT, {"count": 3, "most": 3, "over": 3, "more": 6}),
    (over_other_data, {}, mistakes.LOADER_UNUSED, {}),
    (epochs_by_hand, {}, mistakes.EPOCH_OUTSIDE, {}),
    (two_loops_in_an_epoch, {}, mistakes.LOOP_TWICE, {"epoch": 1}),
]


@pytest.mark.parametrize(
    ("loop", "options", "row", "values"),
    ON_ONE_RANK,
    ids=[f"{row.name}-{loop.__name__}-{options}" for loop, options, row, _ in ON_ONE_RANK],
)
def test_a_mistake_is_refused_where_it_happens_in_the_two_lines_of_its_row(
    loop: Loop, options: dict[str, Any], row: Mistake, values: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as error:
        run(loop, **options)
    assert str(error.value) == str(row.error(**values))


def test_a_layer_that_is_unfrozen_in_an_exact_run_is_refused() -> None:
    model = make_model()
    model[0].requires_grad_(False)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with hpcddp.runtime(**EXACT) as rt:
            *_, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
            unfreezes(Parts(rt, model, optimizer, loader, None))

    with pytest.raises(RequestError) as error:
        train()
    assert str(error.value) == str(mistakes.LAYER_UNFROZEN.error(name="0.weight of Sequential"))


# ---- what looks like a mistake and is none


def skips_and_clears(clear: Callable[[Parts], object]) -> Loop:
    def loop(p: Parts) -> None:
        for n, batch in enumerate(p.loader):
            p.backward(batch)
            nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
            if n != 1:
                p.optimizer.step()
            clear(p)

    return loop


def set_to_none(p: Parts) -> None:
    for parameter in p.model.parameters():
        parameter.grad = None


def fill_with_zeros(p: Parts) -> None:
    for parameter in p.model.parameters():
        parameter.grad.zero_()


def skips_and_clears_before_the_next(p: Parts) -> None:
    for n, batch in enumerate(p.loader):
        p.optimizer.zero_grad(set_to_none=n % 2 == 0)
        p.backward(batch)
        if n != 1:
            p.optimizer.step()


def never_clears(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
        p.optimizer.step()


def changes_the_gradient_itself(p: Parts) -> None:
    for batch in p.loader:
        p.optimizer.zero_grad()
        p.backward(batch)
        for parameter in p.model.parameters():
            parameter.grad = parameter.grad.clamp(-0.1, 0.1)
        p.optimizer.step()


def looks_and_leaves_the_pass(p: Parts) -> None:
    for batch in p.loader:
        with torch.no_grad():
            for x, y in p.rt.micro_batches(batch):
                p.loss(x, y)
                break
            for x, y in p.rt.micro_batches(batch):
                p.loss(x, y)
        p.optimizer.zero_grad()
        p.backward(batch)
        p.optimizer.step()


def an_optimizer_of_something_else(p: Parts) -> None:
    other = nn.Parameter(torch.ones(2))
    own = torch.optim.SGD([other], lr=0.1)
    for batch in p.loader:
        p.optimizer.zero_grad()
        p.backward(batch)
        other.square().sum().backward()
        own.step()
        p.optimizer.step()


def frees_the_gradients_of_one_layer(p: Parts) -> None:
    for batch in p.loader:
        p.optimizer.zero_grad()
        p.backward(batch)
        for parameter in p.model[0].parameters():
            parameter.grad = None
        p.optimizer.step()


def one_batch_without_a_step(p: Parts) -> None:
    for batch in p.loader:
        p.backward(batch)
        break


RIGHT: list[Loop] = [
    trains,
    skips_and_clears(lambda p: p.optimizer.zero_grad()),
    skips_and_clears(lambda p: p.optimizer.zero_grad(set_to_none=False)),
    skips_and_clears(lambda p: p.model.zero_grad()),
    skips_and_clears(set_to_none),
    skips_and_clears(fill_with_zeros),
    skips_and_clears_before_the_next,
    never_clears,
    changes_the_gradient_itself,
    looks_and_leaves_the_pass,
    frees_the_gradients_of_one_layer,
    an_optimizer_of_something_else,
    one_batch_without_a_step,
]


@pytest.mark.parametrize("options", [{}, SPLIT, EXACT], ids=str)
@pytest.mark.parametrize("loop", RIGHT)
def test_what_trains_rightly_is_refused_nothing(
    loop: Loop, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(loop, **options).rt.steps >= 1
    assert "warning" not in capsys.readouterr().err.lower()


@pytest.mark.parametrize("options", [{}, SPLIT, EXACT], ids=str)
@pytest.mark.parametrize("detaches", [True, False])
@pytest.mark.parametrize("clears", [True, False])
def test_optimizers_of_many_tensors_that_take_turns_are_refused_nothing(
    options: dict[str, Any], *, detaches: bool, clears: bool
) -> None:
    """The second one in every second batch, and it has more tensors than are looked at."""
    many = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(300))).double()
    few = nn.Linear(4, 1).double()
    of_many, of_few = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (many, few))
    with hpcddp.runtime(**options) as rt:
        *_, loader = rt.prepare(many, few, of_many, of_few, DataLoader(make_data(), batch_size=6))
        for n, batch in enumerate(loader):
            of_few.zero_grad()
            rt.train_step(batch, lambda m: few(many(m[0]).detach() if detaches else many(m[0])).square().mean())
            of_few.step()
            if n % 2:
                if clears:
                    of_many.zero_grad()
                rt.train_step(batch, lambda m: few(many(m[0])).mean())
                if detaches or clears:
                    of_many.step()
                of_many.zero_grad()
    assert rt.steps == 4


def test_gradients_that_the_loop_has_unscaled_may_be_stepped_on_and_a_scaler_that_is_off_is_no_scaler() -> None:
    def unscales(p: Parts) -> None:
        for x, y in p.loader:
            p.rt.backward(p.loss(x, y), scaler=p.scaler)
            p.scaler.unscale_(p.optimizer)
            p.optimizer.step()
            p.scaler.update()
            p.optimizer.zero_grad()

    expected = [*run(trains).model.parameters()]
    for loop, scales in ((unscales, True), (unscales, False), (scaled_by_hand_and_stepped, False)):
        for found, right in zip(run(loop, scales=scales).model.parameters(), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def scaled_by_hand_and_stepped(p: Parts) -> None:
    for x, y in p.loader:
        p.optimizer.zero_grad()
        p.rt.backward(p.scaler.scale(p.loss(x, y)))
        p.scaler.step(p.optimizer)
        p.scaler.update()


# ---- those that need two ranks

SEQUENTIAL = "Sequential"
ROWS_ON_TWO_RANKS: dict[str, tuple[Mistake, dict[str, Any]]] = {
    "accumulation_by_hand": (mistakes.STEP_ON_SEVERAL, {"kind": "SGD"}),
    "the_old_model_called": (mistakes.MODEL_UNWRAPPED, {"kind": SEQUENTIAL}),
    "the_module_inside_called": (mistakes.MODEL_UNWRAPPED, {"kind": SEQUENTIAL}),
    "the_bare_model_called_with_accumulation": (mistakes.MODEL_UNWRAPPED, {"kind": SEQUENTIAL}),
    "the_bare_model_called_in_an_exact_run": (mistakes.MODEL_UNWRAPPED, {"kind": SEQUENTIAL}),
    "a_compiled_copy_of_the_bare_model_called": (mistakes.MODEL_UNWRAPPED, {"kind": SEQUENTIAL}),
    "two_forwards_then_two_backwards": (mistakes.MODEL_TWICE, {"kind": SEQUENTIAL}),
    **{
        name: (mistakes.LAYER_UNUSED, {"kind": "TwoHeads", "name": "second.weight has no gradient"})
        for name in ("an_unused_layer", "an_unused_layer_with_accumulation", "an_unused_layer_in_an_exact_run")
    },
    "a_layer_replaced_after_prepare": (mistakes.LAYER_REPLACED, {"name": "2.weight", "kind": SEQUENTIAL}),
    "a_layer_replaced_where_some_may_be_unused": (mistakes.LAYER_REPLACED, {"name": "2.weight", "kind": SEQUENTIAL}),
    "shares_that_are_not_in_proportion": (
        mistakes.SHARES_DIFFER,
        {"first": 3, "second": 4, "number": 2, "ranks": 2},
    ),
    "a_count_of_one_of_two_loaders": (mistakes.COUNTS_OF_TWO, {}),
    "a_backward_pass_without_exchange": (mistakes.NO_SYNC, {}),
    "a_forward_pass_without_exchange": (mistakes.NO_SYNC, {}),
    "a_layer_unfrozen_after_prepare": (mistakes.LAYER_UNFROZEN, {"name": "0.weight of Sequential"}),
    "a_layer_frozen_after_prepare": (mistakes.LAYER_FROZEN, {"name": "0.weight", "kind": SEQUENTIAL}),
    "a_layer_frozen_after_prepare_in_an_exact_run": (mistakes.LAYER_FROZEN, {"name": "0.weight", "kind": SEQUENTIAL}),
    "a_group_added_after_prepare": (mistakes.PARAMETERS_FOREIGN, {"count": 1, "kind": "SGD"}),
    "a_layer_added_after_prepare": (mistakes.PARAMETERS_FOREIGN, {"count": 2, "kind": "SGD"}),
}
ON_TWO_RANKS = {
    "weights_loaded_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight of Sequential",
    "weights_changed_on_one_rank_in_a_step": "of rank 0: 2.bias of Sequential differs by up to",
    "another_lr_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight",
    "gradients_clipped_on_one_rank": "after step 1 the weights of rank 1",
    "weights_changed_on_one_rank_late": "after step 6 the weights of rank 1 are not those of rank 0: 0.weight",
    "weights_that_are_no_numbers": "after step 6 the weights are no numbers any more: 0.weight of Sequential has NaN",
    "a_first_step_skipped_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0",
    "a_late_step_skipped_on_one_rank": "after step 6 the weights of rank 1 are not those of rank 0",  # at the end
    "an_average_updated_on_one_rank": "module.0.weight of AveragedModel, which is prepared and not trained, differs by",
    "an_average_by_hand_updated_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight of"
    " Sequential, which is prepared and not trained, differs by",
    "a_teacher_loaded_on_one_rank": "hint: call what changes it on every rank, not under `if rt.is_main:`",
    "an_evaluation_on_one_rank": "by step 3 one rank went 1 time over evaluation data, and another 0\nhint: evaluate",
    "an_evaluation_on_one_rank_after_the_last_checkpoint": "an evaluation ran on some ranks only, and each rank sees",
    "the_model_pickled": "which cannot be pickled\nhint: rt.save_model(path, model), or torch.save(rt.unwrap(model)",
    "a_data_set_that_is_cut_by_rank": "rank 1 gets 12 samples of this TensorDataset: rank 0 gets 11",
    "a_data_set_of_other_samples_by_rank": "rank 1 gets other samples of this Subset than rank 0",
    "a_seed_of_its_own_on_each_rank": (
        "different options: seed=42 on rank 0, seed=43 on rank 1\nhint: hpcddp.runtime(…, seed=42) on every rank"
    ),
    "another_global_batch_on_one_rank": "global_batch=4 on rank 0, global_batch=5 on rank 1",
    "another_micro_batch_on_one_rank": "max_micro_batch=2 on rank 0, max_micro_batch=None on rank 1",
    "exact_on_one_rank": "exact='tree' on rank 0, exact=False on rank 1",
    "other_slices_on_one_rank": "slices=8 on rank 0, slices=4 on rank 1",
    "another_save_every_on_one_rank": "save_every=2 on rank 0, save_every=None on rank 1",
    "a_run_folder_on_one_rank": "run_dir=None on rank 1",
    "shuffled_on_one_rank": (
        "different options: shuffle=True on rank 0, shuffle=False on rank 1\nhint: DataLoader(…, shuffle=True) on every"
    ),
    "cut_on_one_rank": "drop_last=False on rank 0, drop_last=True on rank 1",
    "another_batch_size_on_one_rank": "batch_size=4 on rank 0, batch_size=6 on rank 1",
    "another_batch_size_of_evaluation_on_one_rank": (
        "batch_size=4 on rank 0, batch_size=6 on rank 1\nhint: evaluation data: the same DataLoader(…, batch_size=4)"
    ),
    "evaluation_data_that_are_cut_by_rank": "samples=7 on rank 0, samples=8 on rank 1",
    "evaluation_data_of_other_samples_by_rank": "different options: subset='",
    "another_batch_size_of_a_stream_on_one_rank": "batch_size=4 on rank 0, batch_size=6 on rank 1",
}


def test_no_mistake_of_two_ranks_goes_unsaid(run_ranks: RunRanks, tmp_path: Path) -> None:
    right = (
        "right_loops",
        "request_of_one_rank",
        "a_queue_in_a_buffer",
        "passes_without_exchange_that_are_right",
        "options_that_one_rank_may_have_otherwise",
    )
    names = [*ROWS_ON_TWO_RANKS, *ON_TWO_RANKS, *right]
    outputs = run_ranks("mistake_bodies:make_mistakes", 2, [str(tmp_path), names]).check().outputs
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [said.pop(name) for name in right] == ["nothing was said"] * len(right)
        wrong = {
            name: said[name] for name, (row, values) in ROWS_ON_TWO_RANKS.items()
            if said[name] != str(row.error(**values))
        }  # fmt: skip
        wrong |= {name: said[name] for name, words in ON_TWO_RANKS.items() if words not in said[name]}
        assert wrong == {}, rank
    said_of_buffers = [output.count("hpcddp: warning: the buffer") for output in outputs]
    assert said_of_buffers == [1, 0]
    assert "the buffer queue of Queue is not the same on all ranks" in outputs[0]


def test_every_row_has_a_loop_that_makes_it() -> None:
    made = [*(row for *_, row, _ in ON_ONE_RANK), *(row for row, _ in ROWS_ON_TWO_RANKS.values())]
    assert {row.name for row in made} == {row.name for row in MISTAKES}
    assert len({row.name for row in MISTAKES}) == len(MISTAKES)
