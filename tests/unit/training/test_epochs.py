"""What a loop does after the batches of an epoch is done once, also where an attempt ends right before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpcddp

STEPS = 4  # of an epoch
SLOW = pytest.mark.slow
SAMPLES = 5 * STEPS


class CrashError(Exception):
    """Ends an attempt."""


class Samples(IterableDataset):
    """The same samples as a stream, with or without a length."""

    def __iter__(self) -> Iterable:
        return iter(make_data())


class CountedSamples(Samples):
    def __len__(self) -> int:
        return SAMPLES


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES) % 2)


KINDS: dict[str, Callable] = {"indexed": make_data, "stream": Samples, "counted stream": CountedSamples}


def train(
    run_dir: Path,
    data: object,
    stop_at: int = 0,
    crash_at: int = 0,
    save_every: int | None = None,
    best: bool = False,
    most: int = 0,
) -> list:
    """One attempt; stops or crashes in the step of this number. Returns what it did after the batches of each epoch, of
    which it takes `most` if that is not 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    after = []
    with hpcddp.runtime(run_dir=str(run_dir), save_every=save_every, keep_checkpoints=9) as rt:
        loader = DataLoader(data, batch_size=5)
        model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)
        for epoch in rt.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                if rt.steps + 1 == crash_at:
                    raise CrashError
                optimizer.step()
                if rt.steps + 1 == stop_at:
                    rt.stop("a test")
                if most and rt.steps % most + 1 == most:
                    break
            after.append((epoch, scheduler.get_last_lr()[0], float(torch.rand(()))))
            scheduler.step()
            if best:
                rt.save_best(epoch)
                assert not rt.save_best(epoch)
    return after


def _end(run_dir: Path) -> tuple[str, int, str]:
    state = json.loads((run_dir / "state.json").read_text())
    return state["status"], state["step"], state["weights_sha256"]


@pytest.mark.parametrize(
    ("kind", "stop_at"),
    [
        ("indexed", STEPS),
        ("stream", STEPS),
        *(pytest.param("indexed", n, marks=SLOW) for n in (STEPS - 1, 3 * STEPS)),
        pytest.param("counted stream", 2 * STEPS, marks=SLOW),
    ],
)
def test_a_run_that_stopped_at_the_last_step_of_an_epoch_goes_on_with_what_follows_its_batches(
    tmp_path: Path, kind: str, stop_at: int
) -> None:
    undisturbed = train(tmp_path / "whole", KINDS[kind]())
    first = train(tmp_path / "run", KINDS[kind](), stop_at=stop_at)
    assert len(first) == (stop_at - 1) // STEPS
    assert _end(tmp_path / "run")[:2] == ("unfinished", stop_at)
    assert first + train(tmp_path / "run", KINDS[kind]()) == undisturbed
    assert _end(tmp_path / "run") == _end(tmp_path / "whole") == ("finished", 3 * STEPS, _end(tmp_path / "whole")[2])


@pytest.mark.parametrize("save_every", [STEPS, *(pytest.param(n, marks=SLOW) for n in (2, 2 * STEPS))])
def test_a_run_that_crashed_goes_on_where_its_checkpoint_was_made(tmp_path: Path, save_every: int) -> None:
    undisturbed = train(tmp_path / "whole", make_data())
    with pytest.raises(CrashError):
        train(tmp_path / "run", make_data(), crash_at=2 * STEPS + 2, save_every=save_every)
    again = train(tmp_path / "run", make_data(), save_every=save_every)
    assert again == undisturbed[-len(again) :]
    assert len(again) == 2
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


@pytest.mark.parametrize("save_every", [None, pytest.param(100, marks=SLOW)])
def test_a_checkpoint_that_the_body_asks_for_is_made_at_its_end(tmp_path: Path, save_every: int | None) -> None:
    undisturbed = train(tmp_path / "whole", make_data(), best=True)
    with pytest.raises(CrashError):
        train(tmp_path / "run", make_data(), crash_at=2 * STEPS + 2, save_every=save_every, best=True)
    assert json.loads((tmp_path / "run/checkpoints/best.json").read_text())["step"] == 2 * STEPS
    assert train(tmp_path / "run", make_data(), save_every=save_every, best=True) == undisturbed[2:]
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "stream" else SLOW) for kind in KINDS])
def test_a_loop_that_takes_a_part_of_each_epoch_resumes_after_it(tmp_path: Path, kind: str) -> None:
    undisturbed = train(tmp_path / "whole", KINDS[kind](), most=3)
    with pytest.raises(CrashError):
        train(tmp_path / "run", KINDS[kind](), crash_at=3 + 2, save_every=3, most=3)
    assert train(tmp_path / "run", KINDS[kind](), save_every=3, most=3) == undisturbed[1:]
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


def test_a_body_that_has_ended_is_not_done_again_after_a_stop(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "whole", make_data(), most=3)
    first = train(tmp_path / "run", make_data(), stop_at=3, most=3)
    assert first + train(tmp_path / "run", make_data(), most=3) == undisturbed
    assert _end(tmp_path / "run") == _end(tmp_path / "whole")


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


@pytest.mark.parametrize(
    ("left_at", "reason"), [(1, "the loop left epoch 1 of 3"), (None, "the training loop came to its end")]
)
def test_a_run_whose_loop_was_left_is_finished_and_says_where(
    left_at: int | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        model = nn.Linear(3, 2)
        with hpcddp.runtime(run_dir=str(tmp_path / "run")) as rt:
            model, optimizer, loader = rt.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(), batch_size=5)
            )
            for _ in rt.epochs(3):
                for x, y in loader:
                    rt.backward(cross_entropy(model(x), y))
                    rt.step(optimizer)
                    if rt.steps == left_at:
                        return

    run()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["status"], state["reason"]) == ("finished", reason)
    assert (f": finished early ({reason}) after step 2" in capsys.readouterr().err) is (left_at is not None)
