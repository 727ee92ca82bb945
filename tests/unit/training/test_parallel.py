"""However the ranks split the model, a training has the result of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.xdist_group("parallel")  # one worker trains what the tests of this file share

RunRanks = Callable[..., Any]

# 23 samples in global batches of 10: the ranks' shares differ, and the last of an epoch has 3
CASES: dict[str, dict[str, Any]] = {"uneven": {}, "accumulated": {"max_micro_batch": 2}}
# name -> (ranks, as hpcddp.runtime takes it)
SPLITS: dict[str, tuple[int, Any]] = {
    "zero1": (3, "zero1"),
    "fsdp": (4, "fsdp"),
    "data x shard": (4, {"data": -1, "shard": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


def _train(run_ranks: RunRanks, folder: Path, world_size: int, parallel: Any, name: str) -> dict[str, dict[str, Any]]:
    """The results by case. The first test that asks for a split trains it."""
    out = {case: folder / f"{name}.{case}" for case in CASES}
    if not all(path.exists() for path in out.values()):
        arguments = [{**CASES[case], "parallel": parallel, "out": str(path)} for case, path in out.items()]
        run_ranks("parallel_bodies:train_all", world_size, arguments).check()
    return {
        case: {**torch.load(path), "saved": torch.load(f"{path}.pt", weights_only=True)} for case, path in out.items()
    }


def _apart(ours: Any, theirs: Any) -> float:
    """The largest difference between two nested lists of tensors."""
    if isinstance(ours, torch.Tensor):
        return float((ours - theirs).abs().max())
    return max(_apart(mine, yours) for mine, yours in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "data x shard" else name for name in SPLITS]
)
def test_weights_norms_evaluation_and_saved_model_are_those_of_one_process(
    run_ranks: RunRanks, folder: Path, name: str
) -> None:
    """The optimizer was made before `rt.prepare`, as in any script: it has the sharded parameters afterwards."""
    one, split = _train(run_ranks, folder, 1, "ddp", "one"), _train(run_ranks, folder, *SPLITS[name], name)
    for case in CASES:
        ours, theirs = split[case], one[case]
        assert ours["steps"] == theirs["steps"] == 6
        assert _apart(ours["weights"], theirs["weights"]) < 1e-12, case
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12), case
        assert max(theirs["norms"]) > 0.1, "it was clipped"
        assert ours["total"] == pytest.approx(theirs["total"], rel=1e-12), case
        assert list(ours["saved"]) == list(theirs["saved"]), case
        assert _apart(list(ours["saved"].values()), list(theirs["saved"].values())) < 1e-12, case


def test_the_programs_own_argument_wins_over_the_job_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("parallel_bodies:choose", 2, str(tmp_path), env={"HPCDDP_PARALLEL": "fsdp"}).check()
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [True, False, True]
