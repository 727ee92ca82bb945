"""Loops over the loader and over `rt.epochs`: what a resumed run would not find again is refused. The plain cases are
in test_mistakes.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training import mistakes

from .toy_loop import prepare_toy

STEPS = 4  # of an epoch
MODES: list[dict[str, Any]] = [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 2}]
Step = Callable[[Any], None]


def _chunks(rt: Any, loader: Any, step: Step) -> None:
    for _ in range(2):
        for batch in itertools.islice(loader, 2):
            step(batch)


def _peek(rt: Any, loader: Any, step: Step) -> None:
    next(iter(loader))
    for _ in rt.epochs(1):
        next(iter(loader))
        for batch in loader:
            step(batch)


def _one_by_one(rt: Any, loader: Any, step: Step, count: int = STEPS) -> None:
    for _ in rt.epochs(1):
        for _ in range(count):
            step(next(iter(loader)))


def _more_epochs(rt: Any, loader: Any, step: Step) -> None:
    for count in (2, 3):
        for _ in rt.epochs(count):
            for batch in loader:
                step(batch)


def _again_after_a_break(rt: Any, loader: Any, step: Step) -> None:
    for most in (1, STEPS):
        for _ in rt.epochs(2):
            for _, batch in zip(range(most), loader, strict=False):
                step(batch)
            if most == 1:
                break


def _an_epoch_that_only_evaluates(rt: Any, loader: Any, step: Step) -> None:
    for epoch in rt.epochs(2):
        if epoch:
            for batch in loader:
                step(batch)


def run(loop: Callable[..., None], **options: Any) -> list[int]:
    """The number of steps before each step, and at the end."""
    seen = []
    with hpcddp.runtime(**options) as rt:
        toy = prepare_toy(rt)

        def step(batch: Any) -> None:
            seen.append(rt.steps)
            assert len(toy.loader) == STEPS
            toy.step_in_parts(rt, batch)

        loop(rt, toy.loader, step)
    return [*seen, rt.steps]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        (_chunks, STEPS),
        (_peek, STEPS),
        (_one_by_one, STEPS),
        (_more_epochs, 3 * STEPS),
        (_again_after_a_break, 2 * STEPS),
        (_an_epoch_that_only_evaluates, STEPS),
    ],
)
def test_a_batch_that_is_used_is_a_step_and_one_that_is_only_looked_at_is_none(
    loop: Callable[..., None], steps: int, options: dict[str, Any]
) -> None:
    assert run(loop, **options) == [*range(steps), steps]


def test_a_second_loop_after_the_last_batch_of_an_epoch_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        run(lambda *given: _one_by_one(*given, count=2 * STEPS))
    assert str(error.value) == str(mistakes.LOOP_TWICE.error(epoch=1))


def test_epochs_without_a_loop_over_the_loader_are_refused() -> None:
    with pytest.raises(RequestError) as error:
        run(lambda rt, *_: list(rt.epochs(3)))
    assert str(error.value) == str(mistakes.LOADER_UNUSED.error())
