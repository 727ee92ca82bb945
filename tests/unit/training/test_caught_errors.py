"""A loop that an exception leaves is not finished, and an error of the run that the script catches does not pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

import hpcddp
from hpcddp.errors import HpcddpError, RequestError

from .toy_loop import prepare_toy


class EnoughError(Exception):
    """Ends a loop."""


def bar(items: Any) -> Iterator[Any]:
    """As a progress bar's."""
    yield from items


def run(folder: Path, loop: Callable) -> dict[str, Any]:
    with hpcddp.runtime(run_dir=str(folder / "run"), save_every=3) as rt:
        loop(rt, prepare_toy(rt))
    return json.loads((folder / "run" / "state.json").read_text())


def _caught_outside(rt, toy, wrap=lambda epochs: epochs, at=5):
    try:
        for _ in wrap(rt.epochs(3)):
            for x, y in toy.loader:
                toy.step(rt, x, y)
                if rt.steps == at:
                    raise EnoughError
    except EnoughError:
        rt.print("enough")


def _caught_behind_a_bar(rt, toy):
    _caught_outside(rt, toy, bar)


def _caught_in_a_tail(rt, toy):
    try:
        for _ in rt.epochs(3):
            for x, y in toy.loader:
                toy.step(rt, x, y)
            raise EnoughError
    except EnoughError:
        pass


def _broken_behind_a_bar(rt, toy):
    for _ in bar(rt.epochs(3)):
        for x, y in toy.loader:
            toy.step(rt, x, y)
        try:
            raise EnoughError
        except EnoughError:
            break


def _tried_again(rt, toy):
    _caught_outside(rt, toy)
    for _ in rt.epochs(3):
        for x, y in toy.loader:
            toy.step(rt, x, y)


@pytest.mark.parametrize(
    ("loop", "status", "reason", "saved"),
    [
        (_caught_outside, "unfinished", "the loop left epoch 2 of 3 by an exception", 3),
        (_caught_behind_a_bar, "unfinished", "the loop left epoch 2 of 3 by an exception", 3),
        (_caught_in_a_tail, "unfinished", "the loop left epoch 1 of 3 by an exception", 3),  # in its tail
        (_broken_behind_a_bar, "finished", "the loop left epoch 1 of 3", 4),
        (_tried_again, "finished", "the training loop came to its end", 12),
    ],
)
def test_a_loop_that_an_exception_leaves_is_to_be_resumed(
    loop: Callable, status: str, reason: str, saved: int, tmp_path: Path
) -> None:
    state = run(tmp_path, loop)
    assert (state["status"], state["reason"]) == (status, reason)
    assert max(tmp_path.glob("run/checkpoints/step-*")).name == f"step-{saved:08d}"


def test_a_run_that_an_exception_has_left_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    def train(rt: Any, toy: Any) -> None:
        _caught_outside(rt, toy, at=-1)

    states = [run(tmp_path / name, loop) for name, loop in (("a", train), ("b", _caught_outside), ("b", train))]
    assert [state["status"] for state in states] == ["finished", "unfinished", "finished"]
    assert states[2]["weights_sha256"] == states[0]["weights_sha256"] != states[1]["weights_sha256"]


def _train_wrongly(rt, toy, x, y):
    toy.optimizer.zero_grad()
    cross_entropy(toy.model(x), y).backward()
    toy.optimizer.step()


def _forget_the_backward_pass(rt, toy, x, y):
    toy.model(x)


def _swallow_outside(rt, toy, step):
    try:
        for _ in rt.epochs(3):
            for x, y in toy.loader:
                step(rt, toy, x, y)
    except Exception:
        rt.print("logged")


def _swallow_in_the_epoch(rt, toy, step):
    for epoch in rt.epochs(3):
        try:
            for x, y in toy.loader:
                (step if epoch == 1 else type(toy).step)(*((rt, toy, x, y) if epoch == 1 else (toy, rt, x, y)))
        except Exception:
            rt.print("logged")


@pytest.mark.parametrize("swallow", [_swallow_outside, _swallow_in_the_epoch])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_train_wrongly, "without a new rt.backward"),
        (_forget_the_backward_pass, "a batch of the training loader had no rt.backward"),
    ],
)
def test_an_error_of_the_run_that_the_script_catches_ends_it_all_the_same(
    swallow: Callable, step: Callable, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=f"the script caught an error of this run and went on: .*{message}"):
        run(tmp_path, lambda rt, toy: swallow(rt, toy, step))
    assert json.loads((tmp_path / "run" / "state.json").read_text())["status"] == "failed"


def test_what_a_script_may_catch_in_the_loop_stays_caught(tmp_path: Path) -> None:
    def loop(rt: Any, toy: Any) -> None:
        with pytest.raises(RequestError):
            rt.evaluation_loader(make_empty(), 0)
        for _ in rt.epochs(1):
            for x, y in toy.loader:
                with pytest.raises(HpcddpError):
                    hpcddp.load(tmp_path / "none")
                toy.step(rt, x, y)

    assert run(tmp_path, loop)["status"] == "finished"


def make_empty() -> list[int]:
    return []
