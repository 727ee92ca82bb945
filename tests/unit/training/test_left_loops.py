"""A loop that is left, finished or stopped before its end, or that an exception leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import Toy, deviation, make_data, make_model, prepare_toy, weights_of

MODES: list[dict[str, Any]] = [{}, {"max_micro_batch": 2}, {"exact": True, "slices": 2}]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_after_a_break_behind_a_step_schedulers_and_averages_act(options: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, average = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), AveragedModel(model)
    with hpcddp.runtime(**options) as rt:
        net, *_, loader = rt.prepare(model, optimizer, scheduler, average, DataLoader(make_data(), batch_size=6))
        for _ in rt.epochs(3):
            for nth, batch in enumerate(loader):
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: cross_entropy(net(micro[0]), micro[1]))
                optimizer.step()
                if nth == 1:
                    break
            scheduler.step()
            average.update_parameters(net)
    assert (rt.steps, int(average.n_averaged), optimizer.param_groups[0]["lr"]) == (6, 3, 0.0125)


class Breaks(torch.optim.SGD):
    """Breaks in the middle of its step, once."""

    at = -1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # gives nothing
        self.at -= 1
        first, *_ = self.param_groups[0]["params"]
        if self.at == -1:
            with torch.no_grad():
                first.mul_(0.0)
            raise KeyError("in a step")
        super().step(closure)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_what_an_exception_left_in_the_middle_of_a_step_is_in_no_checkpoint(options: Any, tmp_path: Path) -> None:
    def train(at: int) -> list[Any]:
        model = make_model()
        optimizer = Breaks(model.parameters(), lr=0.1)
        optimizer.at = at
        with hpcddp.runtime(run_dir=str(tmp_path / str(at > 0 or at == -2)), save_every=2, **options) as rt:
            toy = Toy(*rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=6)))
            for _ in rt.epochs(2):
                for batch in toy.loader:
                    toy.step_in_parts(rt, batch)
        return weights_of(model)

    undisturbed = train(-1)
    folder = tmp_path / "True"
    with pytest.raises(KeyError):
        train(7)
    assert json.loads((folder / "state.json").read_text())["status"] == "failed"
    assert deviation(train(-2), undisturbed) == 0


# ---- a loop that is finished or stopped before its end


@pytest.mark.parametrize(("how", "status"), [("finish_early", "finished"), ("stop", "unfinished")])
def test_what_follows_the_loop_runs_if_the_run_is_finished(tmp_path: Path, how: str, status: str) -> None:
    after = []
    with hpcddp.runtime(run_dir=str(tmp_path / "run")) as rt:
        toy = prepare_toy(rt)
        for epoch in rt.epochs(3):
            for x, y in toy.loader:
                toy.step(rt, x, y)
                rt.log(doubled=2 * rt.steps)
                if rt.steps == 1:
                    getattr(rt, how)("good enough")
            after.append(epoch)
        rt.save_model(tmp_path / "weights" / "model.pt")
    [state] = (tmp_path / "run").glob("state.json")
    found = json.loads(state.read_text())
    assert (found["status"], found["reason"], found["step"]) == (status, "good enough", 2)
    [metrics] = (tmp_path / "run").glob("attempts/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["doubled"] for line in lines if line["kind"] == "log"] == [0.0, 2.0]
    if how == "stop":
        assert after == []
        assert rt.stop_reason == "good enough"
        assert not (tmp_path / "weights").exists()
        return
    assert after == [0]
    plain = make_model()
    plain.load_state_dict(torch.load(tmp_path / "weights" / "model.pt", weights_only=True))
    assert deviation(weights_of(plain), weights_of(toy.model)) == 0


def lose_the_weights_in_step_4(run_dir: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(10, run_dir=run_dir, save_every=3, keep_checkpoints=1) as rt:
        _, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data()))
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y) * (torch.nan if rt.steps == 3 else 1.0))
                optimizer.step()


def test_weights_that_are_no_numbers_do_not_take_the_place_of_a_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"after step 4 the weights are no numbers any more: 0\.weight of Sequential"
    ):
        lose_the_weights_in_step_4(str(tmp_path))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_before_a_checkpoint_the_lines_of_all_its_steps_are_there(tmp_path: Path) -> None:
    with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
        toy = prepare_toy(rt)
        for epoch in rt.epochs(2):
            [metrics] = tmp_path.glob("attempts/*/metrics.jsonl")
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            assert [line["step"] for line in lines if line["kind"] == "step"] == [*range(1, 1 + 4 * epoch)]
            for x, y in toy.loader:
                toy.step(rt, x, y)


# ---- exceptions that the script catches


class EnoughError(Exception):
    """Ends a loop."""


def run(folder: Path, loop: Callable) -> dict[str, Any]:
    with hpcddp.runtime(run_dir=str(folder / "run"), save_every=3) as rt:
        loop(rt, prepare_toy(rt))
    return json.loads((folder / "run" / "state.json").read_text())


def _broken(rt, toy):
    for _ in rt.epochs(3):
        for x, y in toy.loader:
            toy.step(rt, x, y)
        break


def _caught(rt, toy):
    try:
        for _ in rt.epochs(3):
            for x, y in toy.loader:
                toy.step(rt, x, y)
                if rt.steps == 5:
                    raise EnoughError
    except EnoughError:
        rt.print("enough")


def _tried_again(rt, toy):
    _caught(rt, toy)
    for _ in rt.epochs(3):
        for x, y in toy.loader:
            toy.step(rt, x, y)


@pytest.mark.parametrize(
    ("loop", "reason", "saved"),
    [
        (_broken, "the loop left epoch 1 of 3", 4),
        (_caught, "the loop left epoch 2 of 3", 6),
        (_tried_again, "the training loop came to its end", 12),
    ],
)
def test_a_loop_that_is_left_has_finished_early_and_one_that_is_begun_again_goes_on(
    loop: Callable, reason: str, saved: int, tmp_path: Path
) -> None:
    state = run(tmp_path, loop)
    assert (state["status"], state["reason"]) == ("finished", reason)
    assert max(tmp_path.glob("run/checkpoints/step-*")).name == f"step-{saved:08d}"
