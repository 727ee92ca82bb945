"""Loops over the loader and over `rt.epochs`: those that a resumed run would not find again are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import make_data, prepare_toy

STEPS = 4  # of an epoch


def _range(rt, loader, step):
    for _ in range(2):
        for batch in loader:
            step(batch)


def _chunks(rt, loader, step):
    for _ in range(2):
        for batch in itertools.islice(loader, 2):
            step(batch)


def _peek(rt, loader, step):
    next(iter(loader))
    for _ in rt.epochs(1):
        for batch in loader:
            step(batch)


def _break(rt, loader, step):
    for _ in rt.epochs(2):
        for n, batch in enumerate(loader):
            if n == 2:
                break
            step(batch)


def _run(loop: Callable) -> list[int]:
    """The number of steps before each step, and at the end."""
    seen = []
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)

        def step(batch: list) -> None:
            seen.append(rt.steps)
            toy.step(rt, *batch)

        loop(rt, toy.loader, step)
    return [*seen, rt.steps]


@pytest.mark.parametrize(
    ("loop", "steps"),
    [(_chunks, [0, 1, 2, 3, 4]), (_peek, [0, 1, 2, 3, 4]), (_break, [0, 1, 2, 3, 4])],
)
def test_a_batch_that_was_only_looked_at_makes_no_step(loop: Callable, steps: list[int]) -> None:
    assert _run(loop) == steps


def test_a_second_epoch_outside_of_rt_epochs_is_refused() -> None:
    with pytest.raises(RequestError, match=r"a second epoch began outside of rt\.epochs\(\).*\nhint: for epoch in"):
        _run(_range)


def _phases(rt, loader, step):
    for _ in rt.epochs(2):
        for _ in range(2):
            for batch in loader:
                step(batch)


def _phases_that_break(rt, loader, step):
    for _ in rt.epochs(2):
        for _ in range(2):
            for n, batch in enumerate(loader):
                step(batch)
                if n == STEPS - 1:
                    break


def _one_at_a_time(rt, loader, step):
    for _ in rt.epochs(1):
        for _ in range(2 * STEPS):
            step(next(iter(loader)))


@pytest.mark.parametrize("loop", [_phases, _phases_that_break, _one_at_a_time])
def test_a_second_loop_after_the_last_batch_of_an_epoch_is_refused(loop: Callable) -> None:
    with pytest.raises(RequestError) as error:
        _run(loop)
    error.match(r"a second loop over the loader began in epoch 1 of rt.epochs\(\), after[\s\S]*\nhint: .* epoch % 2")


def _phases_as_epochs(rt, loader, step):
    for _ in rt.epochs(2 * 2):
        for batch in loader:
            step(batch)


def _parts_of_an_epoch(rt, loader, step):
    for _ in rt.epochs(2):
        for _ in range(2):
            for batch in itertools.islice(loader, 2):
                step(batch)


@pytest.mark.parametrize(("loop", "steps"), [(_phases_as_epochs, 4 * STEPS), (_parts_of_an_epoch, 2 * STEPS)])
def test_phases_that_are_epochs_or_parts_of_one_are_right(loop: Callable, steps: int) -> None:
    assert _run(loop) == [*range(steps), steps]


def _epochs_twice(rt, loader, step, second=2):
    for count in (2, second):
        for _ in rt.epochs(count):
            for batch in loader:
                step(batch)


def test_a_second_rt_epochs_that_has_none_left_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        _run(_epochs_twice)
    error.match(
        r"rt.epochs\(2\) came after rt.epochs\(2\), and 2 epochs are over[\s\S]*\nhint: rt.epochs\(4\) for 2 more"
    )


def _again_after_a_break(rt, loader, step):
    for most in (1, STEPS):
        for _ in rt.epochs(2):
            for _, batch in zip(range(most), loader, strict=False):
                step(batch)
            if most == 1:
                break


def _again_after_a_break_at_the_last_batch(rt, loader, step):
    for most in (1, 2):
        for n, _ in enumerate(rt.epochs(3)):
            for m, batch in enumerate(loader):
                step(batch)
                if m == STEPS - 1:
                    break
            if n + 1 == most:
                break


def _again_after_the_end(rt, loader, step):
    for _ in range(2):
        for _ in rt.epochs(2):
            for batch in loader:
                step(batch)
            rt.finish_early("enough")


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        (lambda *args: _epochs_twice(*args, second=3), 3 * STEPS),
        (_again_after_a_break, 2 * STEPS),
        (_again_after_a_break_at_the_last_batch, 3 * STEPS),
        (_again_after_the_end, STEPS),
    ],
)
def test_a_second_rt_epochs_that_has_some_left_or_follows_an_early_end_is_right(loop: Callable, steps: int) -> None:
    assert _run(loop) == [*range(steps), steps]


def _over_the_raw_data(rt, toy, raw):
    for _ in rt.epochs(3):
        for x, y in raw:
            toy.optimizer.zero_grad()
            cross_entropy(toy.model(x), y).backward()
            toy.optimizer.step()


def _over_nothing(rt, _toy, _raw):
    for _ in rt.epochs(3):
        pass


@pytest.mark.parametrize("loop", [_over_the_raw_data, _over_nothing])
def test_epochs_without_a_loop_over_the_loader_are_refused(loop: Callable) -> None:
    def run() -> None:
        with hpcddp.runtime() as rt:
            loop(rt, prepare_toy(rt), DataLoader(make_data(), batch_size=6))

    with pytest.raises(RequestError, match="no loop over the training loader has begun"):
        run()


def test_an_epoch_that_only_evaluates_may_come_before_those_that_train() -> None:
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)
        for epoch in rt.epochs(2):
            if epoch == 0:
                continue
            for x, y in toy.loader:
                toy.step(rt, x, y)
    assert rt.steps == STEPS


def test_the_length_of_the_loader_is_the_steps_of_an_epoch_wherever_the_loop_is() -> None:
    with hpcddp.runtime(max_micro_batch=2) as rt:
        toy = prepare_toy(rt)
        lengths = {len(toy.loader)}
        for _ in rt.epochs(2):
            for batch in toy.loader:
                toy.step_in_parts(rt, batch)
                lengths.add(len(toy.loader))
    assert lengths == {STEPS}
