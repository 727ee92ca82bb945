"""What a loop does after the batches of an epoch is done once, and every epoch that a run enters gives a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpcddp
from hpcddp.training import opening
from hpcddp.training.stopping import Pace, StopWatch

STEPS = 4  # of an epoch
EPOCHS = 3
SLOW = pytest.mark.slow
SAMPLES = 5 * STEPS


class CrashError(Exception):
    """Ends an attempt."""


class Samples(IterableDataset):
    """The same samples as a stream."""

    def __iter__(self) -> Iterable:
        return iter(make_data())


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES) % 2)


KINDS: dict[str, Callable] = {"indexed": make_data, "stream": Samples}


class Attempt:
    """One attempt at a run, and where it ends. Its loop takes `most` batches of an epoch, if that is not 0."""

    def __init__(self, run_dir: Path, data: object, *, batch: int = 5, most: int = 0, **options: Any) -> None:
        self.run_dir, self.data, self.batch, self.most = run_dir, data, batch, most
        self.options = {"keep_checkpoints": 9} | options
        self.tails: list[tuple] = []  # what was done after the batches of each epoch
        self.steps = 0

    def train(
        self,
        in_step: Callable[[Any, int], object] = lambda rt, step: None,
        in_tail: Callable[[Any, int], object] = lambda rt, epoch: None,
    ) -> list[tuple]:
        """Calls `in_step` with the number of each step, from 1, and `in_tail` with that of each epoch, from 0."""
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with hpcddp.runtime(run_dir=str(self.run_dir), **self.options) as rt:
            loader = DataLoader(self.data, batch_size=self.batch)
            model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)
            for epoch in rt.epochs(EPOCHS):
                for x, y in loader:
                    loss = cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    rt.backward(loss)
                    self.steps += 1
                    optimizer.step()
                    in_step(rt, rt.steps + 1)
                    if self.most and rt.steps % self.most + 1 == self.most:
                        break
                self.tails.append((epoch, float(loss.detach()), scheduler.get_last_lr()[0], float(torch.rand(()))))
                scheduler.step()
                in_tail(rt, epoch)
                del loss
        return self.tails


def stop_at(at: int, rt: Any, now: int) -> None:
    if now == at:
        rt.stop("a test")


def crash_at(at: int, _rt: Any, now: int) -> None:
    if now == at:
        raise CrashError


def _end(run_dir: Path) -> tuple[str, int, str]:
    state = json.loads((run_dir / "state.json").read_text())
    return state["status"], state["step"], state["weights_sha256"]


def _checkpoints(run_dir: Path) -> list[tuple[int, int, int]]:
    """Step, epoch and samples taken of it, of each."""
    manifests = [json.loads(path.read_text()) for path in (run_dir / "checkpoints").glob("step-*/manifest.json")]
    return sorted((one["step"], one["epoch"], one["position"]) for one in manifests)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        pytest.param(kind, most, marks=[] if (kind, most) == ("indexed", 0) else SLOW)
        for kind in KINDS
        for most in (0, 3)
    ],
)
def test_a_loop_that_prints_its_last_loss_and_is_stopped_at_any_step_or_in_any_tail_comes_to_the_same_end(
    tmp_path: Path, kind: str, most: int
) -> None:
    undisturbed = Attempt(tmp_path / "whole", KINDS[kind](), most=most).train()
    steps, whole = (most or STEPS), _end(tmp_path / "whole")
    for nth in range(1, EPOCHS * steps + 1):
        attempt = partial(Attempt, tmp_path / f"step-{nth}", KINDS[kind](), most=most)
        first = attempt().train(in_step=partial(stop_at, nth))
        assert len(first) == nth // steps, "the tail behind an epoch's last step is not left out"
        assert _end(attempt().run_dir)[:2] == ("unfinished", nth)
        assert first + attempt().train() == undisturbed
        assert _end(attempt().run_dir) == whole
    for epoch in range(EPOCHS):
        attempt = partial(Attempt, tmp_path / f"tail-{epoch}", KINDS[kind](), most=most)
        first = attempt().train(in_tail=partial(stop_at, epoch))
        assert len(first) == epoch + 1
        assert first + attempt().train() == undisturbed
        assert _end(attempt().run_dir) == whole


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "stream" else SLOW) for kind in KINDS])
def test_a_run_that_crashed_in_the_tail_of_an_epoch_makes_its_last_step_again(tmp_path: Path, kind: str) -> None:
    undisturbed = Attempt(tmp_path / "whole", KINDS[kind]()).train()
    for epoch in range(EPOCHS):
        attempt = partial(Attempt, tmp_path / f"tail-{epoch}", KINDS[kind]())
        with pytest.raises(CrashError):
            attempt().train(in_tail=partial(crash_at, epoch))
        again = attempt()
        tails = again.train()
        # the tail of the first epoch is not known, and those after it are short
        assert tails == undisturbed[epoch:]
        assert again.steps == (1 if epoch == 0 else STEPS) + STEPS * (EPOCHS - 1 - epoch)
        assert _end(again.run_dir) == _end(tmp_path / "whole")


@pytest.mark.parametrize("save_every", [2, *(pytest.param(n, marks=SLOW) for n in (STEPS, 2 * STEPS))])
def test_a_run_that_crashed_goes_on_where_its_checkpoint_was_made(tmp_path: Path, save_every: int) -> None:
    undisturbed = Attempt(tmp_path / "whole", make_data()).train()
    with pytest.raises(CrashError):
        Attempt(tmp_path / "run", make_data(), save_every=save_every).train(partial(crash_at, 2 * STEPS + 2))
    again = Attempt(tmp_path / "run", make_data(), save_every=save_every).train()
    assert again == undisturbed[-1:]
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, [(3, 0, 15), (4, 1, 0), (8, 2, 0), (12, 3, 0)]),
        ({"save_every": 2}, [(2, 0, 10), (3, 0, 15), (4, 1, 0), (6, 1, 10), (8, 2, 0), (10, 2, 10), (12, 3, 0)]),
        ({"save_every": 100}, [(3, 0, 15), (12, 3, 0)]),
        ({"batch": SAMPLES}, [(1, 1, 0), (2, 2, 0), (3, 3, 0)]),
        ({"batch": SAMPLES, "save_every": 100}, [(3, 3, 0)]),
        ({"batch": 6}, [(3, 0, 18), (4, 1, 0), (8, 2, 0), (12, 3, 0)]),
        ({"most": 3}, [(3, 1, 0), (6, 2, 0), (9, 3, 0)]),
    ],
)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "stream" else SLOW) for kind in KINDS])
def test_a_checkpoint_is_before_an_epochs_last_step_or_behind_its_tail_and_never_between(
    tmp_path: Path, kind: str, options: dict, saved: list
) -> None:
    def save(rt: Any, _epoch: int) -> None:
        assert (tmp_path / "checkpoints" / f"step-{rt.steps:08d}").exists() is False
        if "save_every" not in options:
            rt.save()

    Attempt(tmp_path, KINDS[kind](), **options).train(in_tail=save)
    assert _checkpoints(tmp_path) == saved


@pytest.mark.parametrize(("most", "epoch"), [(0, 1), (0, 2), (3, 1)])
def test_the_best_checkpoint_is_written_at_the_end_of_the_body_with_the_value_that_it_was_given(
    tmp_path: Path, most: int, epoch: int
) -> None:
    def save(rt: Any, epoch: int) -> None:
        assert rt.save_best(float(epoch))
        assert not rt.save_best(float(epoch))
        assert rt.steps == (epoch + 1) * (most or STEPS)

    undisturbed = Attempt(tmp_path / "whole", make_data(), most=most).train(in_tail=save)
    attempt = partial(Attempt, tmp_path / "run", make_data(), most=most, save_every=100)
    with pytest.raises(CrashError):
        attempt().train(in_step=partial(crash_at, epoch * (most or STEPS) + 1), in_tail=save)
    best = json.loads((tmp_path / "run/checkpoints/best.json").read_text())
    assert (best["step"], best["value"]) == (epoch * (most or STEPS), epoch - 1)
    assert (best["step"], epoch, 0) in _checkpoints(tmp_path / "run")
    assert attempt().train(in_tail=save) == undisturbed[epoch:]
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


class Clock:
    """Seconds since a job began, which kills it at `end`."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 0.0, end

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.end:
            raise CrashError


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "indexed" else SLOW) for kind in KINDS])
def test_a_chain_whose_jobs_are_shorter_than_an_epoch_with_its_tail_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    hour, steps, jobs = 3600.0, 0, 0
    undisturbed = Attempt(tmp_path / "whole", KINDS[kind]()).train()
    monkeypatch.setenv("HPCDDP_DEADLINE", str(12.2 * hour))
    while not (state := tmp_path / "run" / "state.json").exists() or '"finished"' not in state.read_text():
        clock, attempt = Clock(12.2 * hour), Attempt(tmp_path / "run", KINDS[kind](), keep_checkpoints=2)
        watch = partial(StopWatch, pace=Pace(clock), now=clock)
        monkeypatch.setattr(opening, "StopWatch", watch)
        try:
            tails = attempt.train(lambda *_, clock=clock: clock.spend(hour), lambda *_, c=clock: c.spend(9 * hour))
        except CrashError:
            tails = []
        jobs, steps = jobs + 1, steps + attempt.steps
        assert jobs < 30
    assert (jobs, steps) == (5, 13)
    assert tails == undisturbed[-1:]
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


def _over_the_loader(rt: Any, loader: Any, step: Callable) -> None:
    for batch in loader:
        step(batch)


def _one_by_one(rt: Any, loader: Any, step: Callable) -> None:
    for _ in range(STEPS - rt.steps):
        step(next(iter(loader)))


@pytest.mark.parametrize("loop", [_over_the_loader, _one_by_one])
def test_the_tail_of_a_loop_outside_of_rt_epochs_is_the_rest_of_the_body(tmp_path: Path, loop: Callable) -> None:
    after = []

    def run(stop: int | None, crashes: bool = False) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
            model, optimizer, loader = rt.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=5)
            )

            def step(batch: list) -> None:
                rt.backward(cross_entropy(model(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()
                if rt.steps + 1 == stop:
                    rt.stop("a test")

            loop(rt, loader, step)
            if crashes:
                raise CrashError
            rt.save()
            after.append(rt.steps)

    run(2)
    assert (after, _checkpoints(tmp_path)) == ([], [(2, 0, 10)])
    with pytest.raises(CrashError):
        run(None, crashes=True)
    assert _checkpoints(tmp_path) == [(2, 0, 10), (3, 0, 15)]
    run(STEPS)
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "finished"
    assert _checkpoints(tmp_path)[-1] == (4, 1, 0)
    assert len(after) == 1


def test_what_is_logged_after_a_step_stands_beside_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=5))
        for _ in rt.epochs(1):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                rt.log(before=loss)
                optimizer.zero_grad()
                rt.backward(loss)
                optimizer.step()
                rt.log(mine=loss)
    logged = {row["step"]: row["mine"] for row in hpcddp.load(tmp_path, kind="log") if "mine" in row}
    assert logged == pytest.approx({row["step"]: row["loss"] for row in hpcddp.load(tmp_path)})
    assert [row["step"] for row in hpcddp.load(tmp_path, kind="log") if "before" in row] == [0, 1, 2, 3]
