"""Stopping and going on, on other numbers of ranks, changes nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunRanks = Callable[..., Any]


def _state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "state.json").read_text())


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    files = sorted(run_dir.glob("attempts/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def _train(run_ranks: RunRanks, run_dir: Path, world_size: int, **more: Any) -> Any:
    argument = {"global_batch": 5, "epochs": 3, "run_dir": str(run_dir), **more}
    env = {"HPCDDP_ATTEMPT": f"attempt-{time.time_ns()}"} | more.pop("env", {})
    return run_ranks("train_toy", world_size, argument, env=env)


@pytest.mark.slow
def test_a_chain_on_two_three_and_one_ranks_gives_the_losses_of_one_undisturbed_run(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    whole, chain = tmp_path / "whole", tmp_path / "chain"
    _train(run_ranks, whole, 1, out=str(tmp_path / "whole.pt")).check()
    _train(run_ranks, chain, 2, fault={"rank": 1, "step": 2, "how": "SIGUSR1"}).check()
    assert _state(chain)["status"] == "unfinished"
    _train(run_ranks, chain, 3, fault={"rank": 0, "step": 8, "how": "SIGTERM"}).check()
    assert _state(chain)["reason"] == "SIGTERM"
    _train(run_ranks, chain, 1, out=str(tmp_path / "chain.pt")).check()
    assert _state(chain)["status"] == "finished"
    steps = 3 * 5
    assert _state(chain)["step"] == _state(whole)["step"] == steps
    assert [line["step"] for line in _metrics(chain)] == list(range(1, steps + 1))
    assert [line["epoch"] for line in _metrics(chain)] == [step // 5 for step in range(steps)]
    for ours, theirs in zip(_metrics(chain), _metrics(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    last, expected = (torch.load(tmp_path / name)["trajectory"][-1][1] for name in ("chain.pt", "whole.pt"))
    assert max(float((a - b).abs().max()) for a, b in zip(last, expected, strict=True)) < 1e-12


def test_a_signal_to_one_rank_leaves_a_checkpoint_and_all_ranks_exit_0(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = _train(run_ranks, tmp_path, 2, fault={"rank": 1, "step": 3, "how": "SIGUSR1"})
    assert outcome.statuses == [0, 0]
    state = _state(tmp_path)
    assert (state["status"], state["reason"]) == ("unfinished", "SIGUSR1")
    assert (tmp_path / "checkpoints" / f"step-{state['step']:08d}").is_dir()
    assert state["step"] <= 5  # raised in step 4, agreed one step later


def test_a_deadline_that_is_near_stops_the_run_without_any_signal(run_ranks: RunRanks, tmp_path: Path) -> None:
    _train(run_ranks, tmp_path, 2, env={"HPCDDP_DEADLINE": str(time.time() + 4)}).check()
    state = _state(tmp_path)
    assert (state["status"], state["reason"]) == ("unfinished", "deadline")
    assert (tmp_path / "checkpoints" / f"step-{state['step']:08d}").is_dir()


def test_a_rank_that_fails_ends_the_run_and_is_named_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = _train(run_ranks, tmp_path, 3, fault={"rank": 1, "step": 2, "how": "raise"})
    assert 0 not in outcome.statuses
    assert None not in outcome.statuses, "a rank hangs"
    told = [output.count("hpcddp: rank 1 on ") for output in outcome.outputs]
    assert told == [0, 1, 0], outcome.outputs
    for other in (0, 2):
        assert outcome.outputs[other].count("Traceback") == 1, "the broken connection is not told"
        assert outcome.outputs[other].count("rank 1 on ") == 1
    state = _state(tmp_path)
    assert state["status"] == "failed"
    assert f"rank 1 on {os.uname().nodename} failed: ValueError: a broken sample" in state["reason"]
