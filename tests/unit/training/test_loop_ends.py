"""A loop that is left, finished or stopped before its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcddp
from hpcddp.errors import RequestError

from .toy_loop import deviation, make_data, make_model, prepare_toy, weights_of


def test_a_loop_that_is_left_after_a_step_counts_it() -> None:
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(1):
            for x, y in toy.loader:
                toy.step(rt, x, y)
                break
        assert rt.steps == 1


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
        assert rt.stopping
        assert not (tmp_path / "weights").exists()
        return
    assert after == [0]
    plain = make_model()
    plain.load_state_dict(torch.load(tmp_path / "weights" / "model.pt", weights_only=True))
    assert deviation(weights_of(plain), weights_of(toy.model)) == 0


def lose_the_weights_in_step_4(run_dir: str, stop: str | None) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(10, run_dir=run_dir, save_every=3, keep_checkpoints=1) as rt:
        _, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data()))
        for _ in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y) * (torch.nan if rt.steps == 3 else 1.0))
                if rt.steps == 3 and stop:
                    rt.stop(stop)
                optimizer.step()


@pytest.mark.parametrize("stop", [None, "the time is over"])
def test_weights_that_are_no_numbers_do_not_take_the_place_of_a_good_checkpoint(
    tmp_path: Path, stop: str | None
) -> None:
    with pytest.raises(
        RequestError, match=r"after step 4 the weights are no numbers any more: 0\.weight of Sequential"
    ):
        lose_the_weights_in_step_4(str(tmp_path), stop)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_a_run_that_is_stopped_between_two_epochs_leaves_the_body_before_the_next_one() -> None:
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(3):
            for x, y in toy.loader:
                toy.step(rt, x, y)
            rt.stop("enough for now")
        pytest.fail("this is not reached")
    assert rt.steps == 4


def test_before_a_checkpoint_the_lines_of_all_its_steps_are_there(tmp_path: Path) -> None:
    with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
        toy = prepare_toy(rt)
        for epoch in rt.epochs(2):
            [metrics] = tmp_path.glob("attempts/*/metrics.jsonl")
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            assert [line["step"] for line in lines if line["kind"] == "step"] == [*range(1, 1 + 4 * epoch)]
            for x, y in toy.loader:
                toy.step(rt, x, y)
