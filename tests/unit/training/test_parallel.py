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
    "tensor": (2, {"tensor": 2}),
    "shard x tensor": (4, {"shard": -1, "tensor": 2}),
    "data x tensor by FSDP": (4, {"data": 2, "shard": 1, "tensor": 2}),
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
    "name",
    [name if name in {"fsdp", "shard x tensor"} else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS],
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


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": -1, "tensor": 2}, {"data": -1, "shard": 2}], ids=str)
def test_layers_that_are_gathered_on_their_own_and_layers_outside_of_the_plan_compute_as_in_one_process(
    run_ranks: RunRanks, tmp_path: Path, parallel: Any
) -> None:
    for world_size, split in ((1, "ddp"), (4, parallel)):
        argument = {"attentive": True, "parallel": split, "out": str(tmp_path / str(world_size))}
        run_ranks("parallel_bodies:train", world_size, argument).check()
    ours, theirs = (torch.load(tmp_path / name) for name in ("4", "1"))
    assert _apart(ours["weights"], theirs["weights"]) < 1e-12
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12)


# each part: ranks, split, form of its checkpoint; together they are as long as the undisturbed run
CHAINS: dict[str, list[tuple[int, Any, str | None]]] = {
    "to tensor ranks and back": [(2, "ddp", None), (4, {"shard": -1, "tensor": 2}, None), (1, "ddp", None)],
    "beside the training": [(4, {"shard": 2, "tensor": 2}, "async"), (2, "fsdp", "async"), (2, {"tensor": 2}, None)],
    "a mesh": [
        (4, {"data": 2, "shard": 1, "tensor": 2}, None),
        (3, "zero1", None),
        (4, {"shard": -1, "tensor": 2}, None),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", [*CHAINS])
def test_a_chain_of_splits_follows_one_undisturbed_run(run_ranks: RunRanks, tmp_path: Path, chain: str) -> None:
    run_ranks("parallel_bodies:train", 1, {"out": str(tmp_path / "whole")}).check()
    weights: list[Any] = []
    for stop_at, (world_size, parallel, form) in zip((2, 4, None), CHAINS[chain], strict=True):
        argument = {"parallel": parallel, "checkpoint": form, "stop_at": stop_at, "run_dir": str(tmp_path / "run")}
        out, env = tmp_path / f"part-{stop_at}", {"HPCDDP_ATTEMPT": str(stop_at)}
        run_ranks("parallel_bodies:train", world_size, {**argument, "out": str(out)}, env=env).check()
        weights += torch.load(out)["weights"]
    assert _apart(weights, torch.load(tmp_path / "whole")["weights"]) < 1e-12


def test_a_split_that_cannot_be_is_refused(run_ranks: RunRanks) -> None:
    expected = {
        "none": "it has no tensor plan | rt.wrap(model, tensor_plan=",
        "name": "tensor_plan has 'up', and the Sequential has no such module",
        "style": "tensor_plan has 'columns' for '0', which is no style",
        "tied": "0.weight and 1.weight are one parameter, which tensor parallel would make two",
        "rows": "0.weight has 3 rows, which 2 tensor ranks x 1 shards cannot divide evenly",
        "exact": "exact mode needs whole layers",
        "LBFGS": "this LBFGS steps all parameters together",
    }
    told = run_ranks("parallel_bodies:divide_wrongly", 2, list(expected)).check().outputs[0]
    for case, words in expected.items():
        [line] = [line for line in told.splitlines() if line.startswith(f"{case}: ")]
        assert words in line
