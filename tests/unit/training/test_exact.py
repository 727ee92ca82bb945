"""The same weights and losses, bit for bit, on any number of ranks, with all that makes plain DDP depend on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import LaunchError
from hpcddp.training.gradient.exact import deterministic_kernels

from .exact_bodies import read_result

RunRanks = Callable[..., Any]
Options = dict[str, Any]

# Augmentation, dropout, BatchNorm, weight averaging and a last partial batch of 18 of 24 samples are in all of them.
TREE: dict[str, Options] = {
    "adamw, clipped": {"clip": 0.5},
    "a layer that some slices do not use": {"conditional": True, "epochs": 1},
    "bf16 weights": {"bf16": True, "epochs": 1},
    # the norm's sum follows the gradients' memory order
    "sgd, autocast, channels_last, clipped": {
        **dict.fromkeys(("sgd", "amp", "channels_last", "ema_buffers"), True),
        "clip": 0.05,
        "epochs": 1,
    },
}
INTEGER: dict[str, Options] = {
    "adamw, clipped": {"exact": "integer", "slices": 12, "clip": 0.5},
    "sgd, channels_last": {"exact": "integer", "slices": 8, "sgd": True, "channels_last": True, "epochs": 1},
}
# A sharded model: on one rank it is the bare one.
SHARDED: dict[str, Options] = {
    "fsdp": {"exact": "integer", "slices": 12, "clip": 0.5, "parallel": "fsdp", "ema": False, "epochs": 1}
}


@pytest.fixture
def results(run_ranks: RunRanks, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """results(world_size, cases) trains each case on so many ranks: {case: weights' hash and losses}."""

    def run(world_size: int, cases: dict[str, Options]) -> dict[str, Any]:
        asked = [
            {**options, "run_dir": str(tmp_path / f"{world_size}-{name}"), "attempt": "a"}
            for name, options in cases.items()
        ]
        run_ranks("exact_bodies:train_several", world_size, asked).check()
        return {name: read_result(Path(one["run_dir"])) for name, one in zip(cases, asked, strict=True)}

    return run


@pytest.mark.parametrize("world_size", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in (4, 8))])
def test_a_tree_gives_one_result_on_ranks_that_share_it(
    results: Callable[..., dict[str, Any]], world_size: int
) -> None:
    cases = {name: options for name, options in TREE.items() if world_size < 8 or name == "adamw, clipped"}
    assert results(world_size, cases) == results(1, cases)


@pytest.mark.parametrize("world_size", [3, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 5, 7))])
def test_integers_give_one_result_on_any_number_of_ranks(
    results: Callable[..., dict[str, Any]], world_size: int
) -> None:
    cases = {name: options for name, options in INTEGER.items() if world_size < 7 or name == "adamw, clipped"}
    cases |= SHARDED if 12 % world_size == 0 else {}
    assert results(world_size, cases) == results(1, cases)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        pytest.param("tree", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param("integer", (4, 2, 8), marks=pytest.mark.slow),
    ],
)
def test_a_chain_of_killed_attempts_on_other_numbers_of_ranks_ends_as_one_undisturbed_rank(
    run_ranks: RunRanks, tmp_path: Path, method: str, sizes: tuple[int, int, int]
) -> None:
    common = {"exact": method, "save_every": 2}
    whole, chain = tmp_path / "whole", tmp_path / "chain"
    run_ranks("exact_bodies:train", 1, {**common, "run_dir": str(whole), "attempt": "a"}).check()
    faults: list[dict[str, int]] = [{"kill_at": 3, "kill_rank": sizes[0] - 1}, {"kill_at": 5, "kill_rank": 0}, {}]
    for world_size, fault in zip(sizes, faults, strict=True):
        argument = {**common, **fault, "run_dir": str(chain), "attempt": f"on-{world_size}"}
        outcome = run_ranks("exact_bodies:train", world_size, argument)
        assert (-9 in outcome.statuses) == bool(fault), "\n".join(outcome.outputs)
        assert None not in outcome.statuses, "a rank hangs"
    outcome.check()
    assert read_result(chain) == read_result(whole)
    assert json.loads((chain / "state.json").read_text())["status"] == "finished"


def test_going_on_with_other_sums_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("exact_bodies:train", 1, {"run_dir": str(tmp_path), "attempt": "a", "stop_at": 2}).check()
    outcome = run_ranks("exact_bodies:train", 1, {"run_dir": str(tmp_path), "attempt": "b", "slices": 4})
    assert outcome.statuses == [1]
    assert "-> tree, 4 slices" in outcome.outputs[0].partition("was recorded with other settings:")[2]


@pytest.mark.slow
def test_going_on_with_other_hardware_is_said_and_recorded(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("exact_bodies:train", 1, {"run_dir": str(tmp_path), "attempt": "a", "stop_at": 2}).check()
    (manifest,) = tmp_path.glob("checkpoints/*/manifest.json")
    facts = json.loads(manifest.read_text())
    facts["exact"]["conditions"]["cpu"] = "Abacus 2"
    manifest.write_text(json.dumps(facts))
    outcome = run_ranks("exact_bodies:train", 2, {"run_dir": str(tmp_path), "attempt": "b"}).check()
    assert "the run is no longer exact: after step 2, cpu is " in outcome.outputs[0]
    (deviation,) = json.loads((tmp_path / "state.json").read_text())["exact"]["deviations"]
    assert deviation.endswith(", not Abacus 2")
    more = {"epochs": 3}  # it was finished with 2
    run_ranks("exact_bodies:train", 1, {"run_dir": str(tmp_path), "attempt": "c", **more}).check()
    assert json.loads((tmp_path / "state.json").read_text())["exact"]["deviations"] == [deviation]


def test_ranks_that_would_compute_otherwise_are_refused_at_the_start(run_ranks: RunRanks, tmp_path: Path) -> None:
    argument = {"run_dir": str(tmp_path), "attempt": "a", "tf32_rank": 1}
    outcome = run_ranks("exact_bodies:train", 2, argument)
    assert 0 not in outcome.statuses
    said = "on rank 1 (.*) matmul_precision is high, not highest as on rank 0"
    assert re.search(said, "".join(outcome.outputs))


def test_a_contrary_workspace_is_refused() -> None:
    with (
        pytest.raises(LaunchError, match="CUBLAS_WORKSPACE_CONFIG=':0:0' lets cuBLAS add in any order"),
        deterministic_kernels({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}),
    ):
        pass


def test_calls_that_nothing_goes_backward_from_and_a_second_backward_pass_are_the_same_on_any_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for ranks in (1, 2):
        run_ranks("exact_forward_bodies:train_all", ranks, str(tmp_path / f"{ranks}.json")).check()
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert one == two
