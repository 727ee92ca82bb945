"""Each row of the table of mistakes has a loop that makes it: the error has the row's two lines. What trains rightly
is refused nothing, and no mistake of several ranks goes unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
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

from .mistake_bodies import RIGHT as RIGHT_ON_TWO
from .mistake_bodies import ROWS, SAID
from .toy_loop import make_data, make_model

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


# ---- what a loop does with each batch, and with each micro batch

Act = Callable[[Parts, Any], object]
MicroAct = Callable[[Parts, Any, Any], object]


def over(*acts: Act) -> Loop:
    def loop(p: Parts) -> None:
        for batch in p.loader:
            for act in acts:
                act(p, batch)

    return loop


def micro(*acts: MicroAct) -> Act:
    def act(p: Parts, batch: Any) -> None:
        for x, y in p.rt.micro_batches(batch):
            for one in acts:
                one(p, x, y)

    return act


def at(which: Callable[[int], object], act: Act) -> Act:
    """Only in the batches of these numbers, from 0."""
    return lambda p, batch: which(p.rt.steps) and act(p, batch)


def back(p: Parts, batch: Any) -> None:
    p.backward(batch)


def step(p: Parts, *_: Any) -> None:
    p.optimizer.step()


def zero(p: Parts, *_: Any) -> None:
    p.optimizer.zero_grad()


def zero_in_place(p: Parts, *_: Any) -> None:
    p.model.zero_grad(set_to_none=False)


def clip(p: Parts, *_: Any) -> None:
    nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)


def rt_backward(p: Parts, x: Any, y: Any) -> None:
    p.rt.backward(p.loss(x, y))


def plain_backward(p: Parts, x: Any, y: Any) -> None:
    p.loss(x, y).backward()


def in_turn(*loops: Loop) -> Loop:
    def loop(p: Parts) -> None:
        for one in loops:
            one(p)

    return loop


def unpack(p: Parts, batch: Any) -> None:
    x, y = batch
    rt_backward(p, x, y)


def backward_behind_the_micro_batches(p: Parts, batch: Any) -> None:
    for x, y in p.rt.micro_batches(batch):
        loss = p.loss(x, y)
    p.rt.backward(loss)


def leave_out(nth: int) -> Act:
    def act(p: Parts, batch: Any) -> None:
        for n, (x, y) in enumerate(p.rt.micro_batches(batch)):
            if n != nth:
                rt_backward(p, x, y)

    return act


def break_off(p: Parts, batch: Any) -> None:
    for x, y in p.rt.micro_batches(batch):
        rt_backward(p, x, y)
        break


def go_over_the_batch_before(p: Parts) -> None:
    before = None
    for batch in p.loader:
        p.backward(batch if before is None else before)
        p.optimizer.step()
        p.optimizer.zero_grad()
        before = batch


def hook_that_steps(*, own: bool) -> Loop:
    """An optimizer steps in the backward pass: that of the run, or another one on its weights."""

    def loop(p: Parts) -> None:
        first = next(iter(p.model.parameters()))
        optimizer = torch.optim.SGD([first], lr=0.1) if own else p.optimizer
        hook = first.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        try:
            over(back)(p)
        finally:
            hook.remove()

    return loop


def schedule_without_preparing(p: Parts) -> None:
    torch.optim.lr_scheduler.StepLR(p.optimizer, 1)
    trains(p)


def epochs_of(loop: Loop, count: int = 2) -> Loop:
    def epochs(p: Parts) -> None:
        for _ in p.rt.epochs(count):
            loop(p)

    return epochs


def read_other_data(p: Parts) -> None:
    for x, y in DataLoader(make_data(), batch_size=6):
        plain_backward(p, x, y)


MODES: tuple[dict[str, Any], ...] = ({}, SPLIT, EXACT)
FITS = {"max_micro_batch": 6}  # the share fits; the loop is the same all the same
SGD = {"kind": "SGD"}
trains = over(zero, back, step)

Row = tuple[Loop, dict[str, Any], Mistake, dict[str, Any]]
ON_ONE_RANK: list[Row] = [
    *((over(unpack), options, mistakes.BATCH_UNPACKED, {}) for options in (SPLIT, EXACT, FITS)),
    (over(lambda p, batch: batch.x), SPLIT, mistakes.BATCH_UNPACKED, {}),
    (lambda p: rt_backward(p, *make_data()[:6]), {}, mistakes.BACKWARD_OUTSIDE, {"when": ""}),
    *(
        (
            in_turn(trains, lambda p: rt_backward(p, *make_data()[:6])),
            options,
            mistakes.BACKWARD_OUTSIDE,
            {"when": " (it was over)"},
        )
        for options in ({}, SPLIT)
    ),
    *(
        (over(backward_behind_the_micro_batches), options, mistakes.MICRO_LOOP_MISSING, {})
        for options in (SPLIT, FITS, EXACT)
    ),
    (go_over_the_batch_before, SPLIT, mistakes.OTHER_BATCH, {}),
    (over(leave_out(0), step), SPLIT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": 1, "all": 2}),
    (over(leave_out(1), step), EXACT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": 1, "all": 2}),
    (over(break_off), SPLIT, mistakes.MICRO_BATCH_LEFT_OUT, {"done": "some", "all": 3}),
    (over(break_off, step), SPLIT, mistakes.STEP_EARLY, SGD),
    *(
        (over(micro(lambda p, x, y: p.loss(x, y))), options, mistakes.BATCH_WITHOUT_BACKWARD, {"stepped": ""})
        for options in MODES
    ),
    (over(lambda p, batch: p.rt.backward(p.loss(*batch), of=batch[0].clone())), {}, mistakes.OF_UNKNOWN, {}),
    (
        over(micro(lambda p, x, y: [None for _ in p.rt.micro_batches(p.rt._loop.batch)])),
        SPLIT,
        mistakes.OTHER_BATCH,
        {},
    ),
    (hook_that_steps(own=False), {}, mistakes.STEP_IN_BACKWARD, SGD),
    (hook_that_steps(own=True), SPLIT, mistakes.STEP_IN_BACKWARD, SGD),
    *((over(micro(rt_backward, step)), options, mistakes.STEP_EARLY, SGD) for options in (SPLIT, FITS)),
    *((over(back, step, step), options, mistakes.STEP_AGAIN, SGD) for options in MODES),
    *((over(micro(zero, plain_backward), step), options, mistakes.STEP_AGAIN, SGD) for options in MODES),
    *(
        (loop, options, mistakes.STEP_ON_SEVERAL, SGD)
        for loop in (
            over(back, at(lambda n: n % 2, step), at(lambda n: n % 2, zero)),  # accumulated by hand
            over(back, clip, at(lambda n: n != 1, step), at(lambda n: n != 1, zero)),  # left out, and not cleared
            in_turn(over(back), step),
        )
        for options in MODES
    ),
    (trains, {"leaves_out": "optimizer"}, mistakes.STEP_NOT_PREPARED, SGD),
    (schedule_without_preparing, {}, mistakes.SCHEDULER_NOT_PREPARED, SGD),
    (trains, {"leaves_out": "model"}, mistakes.PARAMETERS_FOREIGN, SGD | {"count": 4}),
    (epochs_of(read_other_data), {}, mistakes.LOADER_UNUSED, {}),
    (in_turn(trains, trains), {}, mistakes.EPOCH_OUTSIDE, {}),
    (epochs_of(in_turn(trains, trains)), {}, mistakes.LOOP_TWICE, {"epoch": 1}),
]


NAMES = {row: name for name, row in MISTAKES.items()}


@pytest.mark.parametrize(
    ("loop", "options", "row", "values"),
    ON_ONE_RANK,
    ids=[f"{NAMES[row]}-{nth}" for nth, (_, _, row, _) in enumerate(ON_ONE_RANK)],
)
def test_a_mistake_is_refused_where_it_happens_in_the_two_lines_of_its_row(
    loop: Loop, options: dict[str, Any], row: Mistake, values: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as error:
        run(loop, **options)
    assert str(error.value) == str(row.error(**values))


# ---- what looks like a mistake and is none


def set_to_none(p: Parts, *_: Any) -> None:
    for parameter in p.model.parameters():
        parameter.grad = None


def fill_with_zeros(p: Parts, *_: Any) -> None:
    for parameter in p.model.parameters():
        parameter.grad.zero_()


def change_the_gradient_itself(p: Parts, *_: Any) -> None:
    for parameter in p.model.parameters():
        parameter.grad = parameter.grad.clamp(-0.1, 0.1)


@torch.no_grad()
def look_and_leave_the_pass(p: Parts, batch: Any) -> None:
    for x, y in p.rt.micro_batches(batch):
        p.loss(x, y)
        break
    micro(lambda p, x, y: p.loss(x, y))(p, batch)


def step_on_something_else(p: Parts, *_: Any) -> None:
    other = nn.Parameter(torch.ones(2))
    other.square().sum().backward()
    torch.optim.SGD([other], lr=0.1).step()


skip_the_second = at(lambda n: n != 1, step)
RIGHT: dict[str, Loop] = {
    "trains": trains,
    **{
        f"skips a step, then {clear.__name__}": over(back, clip, skip_the_second, clear)
        for clear in (zero, zero_in_place, set_to_none, fill_with_zeros)
    },
    "clears before the next": over(zero, back, skip_the_second),
    "never clears": over(back, step),
    "changes the gradient itself": over(zero, back, change_the_gradient_itself, step),
    "looks and leaves the pass": over(look_and_leave_the_pass, zero, back, step),
    "an optimizer of something else": over(zero, back, step_on_something_else, step),
}


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("loop", RIGHT.values(), ids=RIGHT)
def test_what_trains_rightly_is_refused_nothing(
    loop: Loop, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(loop, **options).rt.steps >= 1
    assert "warning" not in capsys.readouterr().err.lower()


def test_gradients_that_the_loop_has_unscaled_may_be_stepped_on() -> None:
    def unscales(p: Parts, batch: Any) -> None:
        p.rt.backward(p.loss(*batch), scaler=p.scaler)
        p.scaler.unscale_(p.optimizer)
        p.optimizer.step()
        p.scaler.update()

    expected = [*run(trains).model.parameters()]
    for scales in (True, False):
        for found, right in zip(run(over(zero, unscales), scales=scales).model.parameters(), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


# ---- those that need two ranks


def test_no_mistake_of_two_ranks_goes_unsaid_and_what_is_right_is_refused_nothing(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("mistake_bodies:run_all", 2, str(tmp_path)).check()
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name: said[name] for name in RIGHT_ON_TWO if said[name]} == {}
        wrong = {name: said[name] for name, (_, row, values) in ROWS.items() if said[name] != str(row.error(**values))}
        wrong |= {name: said[name] for name, (_, words) in SAID.items() if words not in said[name]}
        assert wrong == {}, rank


def test_every_row_has_a_loop_that_makes_it() -> None:
    made = [*(row for *_, row, _ in ON_ONE_RANK), *(row for _, row, _ in ROWS.values())]
    assert {NAMES[row] for row in made} == MISTAKES.keys()
