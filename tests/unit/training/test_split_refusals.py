"""What a split of the model over ranks would get wrong without an error is refused; what only looks like it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]


def _refuse(run_ranks: RunRanks, folder: Path, cases: list[str]) -> list[dict[str, str]]:
    """By rank what each case is told."""
    run_ranks("split_bodies:refuse_all", 2, {"cases": cases, "folder": str(folder)}).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_layers_that_only_some_ranks_use_in_a_step_are_refused_in_shards(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = ["by batch, fsdp", "by batch, copies", "unused on all", "passed through"]
    for told in _refuse(run_ranks, tmp_path, cases):
        for case in cases[:2]:
            assert "only 1 of 2 ranks have a gradient for first.weight of the Choosing" in told[case], case
            assert "find_unused_parameters=True" in told[case]
        assert told["unused on all"] == told["passed through"] == ""


@pytest.mark.slow
def test_a_penalty_on_parameters_in_parts_is_refused_by_tensor_ranks_and_right_where_its_numbers_are_made_whole(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    whole = [f"whole squares, {split}" for split in ("ddp", "tensor", "fsdp")]
    for told in _refuse(run_ranks, tmp_path, [*whole, "squares, tensor"]):
        assert [told[case] for case in whole] == ["", "", ""]
        assert "which the ranks have in parts (a DTensor)" in told["squares, tensor"]
        assert "p.square().sum().full_tensor() for p in model.parameters()" in told["squares, tensor"]


@pytest.mark.slow
def test_adafactor_is_refused_on_parameters_in_parts(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = [f"Adafactor, {split}" for split in ("fsdp", "tensor", "exact", "zero1")]
    for told in _refuse(run_ranks, tmp_path, cases):
        for case in cases[:2]:
            assert "of class Adafactor, takes means over the rows and columns of each parameter" in told[case]
            assert 'hpcddp.runtime(parallel="zero1")' in told[case]
        assert told["Adafactor, exact"] == told["Adafactor, zero1"] == ""


def test_an_optimizer_with_state_before_its_first_step_moves_to_the_parts_and_numbers_that_are_assigned_reach_them(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    cases = [f"Adagrad, {split}" for split in ("ddp", "fsdp", "tensor")]
    for told in _refuse(run_ranks, tmp_path, cases):
        assert set(told.values()) == {""}


def test_layers_that_shards_cannot_take_are_refused_by_name(run_ranks: RunRanks, tmp_path: Path) -> None:
    for told in _refuse(run_ranks, tmp_path, ["sparse, fsdp", "mixed, fsdp", "mixed, frozen, fsdp"]):
        assert "0 has sparse=True, whose gradients have some rows, and parallel fsdp" in told["sparse, fsdp"]
        assert "0.weight is torch.float64, 1.weight is torch.float32" in told["mixed, fsdp"]
        assert told["mixed, frozen, fsdp"] == ""


@pytest.mark.slow
def test_a_compiled_model_is_refused_where_its_layers_are_divided(run_ranks: RunRanks, tmp_path: Path) -> None:
    for told in _refuse(run_ranks, tmp_path, ["compiled, tensor"]):
        assert "tensor 2) divides the layers of a model" in told["compiled, tensor"]
        assert "this Halves has been given to torch.compile" in told["compiled, tensor"]
