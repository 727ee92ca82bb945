"""Ranks with one data rank see the same samples and are counted once: 4 ranks as 2 data ranks x 2."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.files import list_checkpoint_folders, read_manifest
from hpcddp.training.parallel.layout import plan_layout

pytestmark = pytest.mark.xdist_group("layout")  # one worker trains what the tests of this file share

RunRanks = Callable[..., Any]

# 23 samples in global batches of 10: in the last step of an epoch a data rank has 2, the other 1
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"options": {"max_micro_batch": 2}},
    "counted parts": {"options": {"max_micro_batch": 2}, "count": True},
    "exact": {"options": {"exact": "integer", "slices": 8}},
    "sharded": {"parallel": "fsdp", "options": {}, "epochs": 1},
    "statistics": {"norm": True, "global_batch": 12, "options": {"max_micro_batch": 3}},
}
FORMS = {"one rank": (1, 1), "two ranks": (2, 1), "two by two": (4, 2)}
SAME_ON_ONE_RANK = [name for name in CASES if name != "statistics"]  # BatchNorm depends on the split

Results = dict[str, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layout")


def _train(run_ranks: RunRanks, folder: Path, form: str) -> dict[str, list[dict[str, Any]]]:
    """The results of each case by rank. The first test that asks for a form trains it."""
    world_size, model_ranks = FORMS[form]
    arguments = []
    for name, case in CASES.items():
        options = case["options"] | {"run_dir": str(folder / f"{form} {name}")}
        arguments.append(
            {**case, "options": options, "model_ranks": model_ranks, "out": str(folder / f"{form}.{name}")}
        )
    if not (folder / f"{form}.accumulated-0").exists():
        run_ranks("layout_bodies:train_all", world_size, arguments).check()
    return {name: [torch.load(folder / f"{form}.{name}-{rank}") for rank in range(world_size)] for name in CASES}


def _apart(ours: Any, theirs: Any) -> float:
    """The largest difference between two nested lists of tensors."""
    if isinstance(ours, torch.Tensor):
        return float((ours.double() - theirs.double()).abs().max())
    return max((_apart(mine, yours) for mine, yours in zip(ours, theirs, strict=True)), default=0.0)


@pytest.mark.slow
def test_ranks_with_one_data_rank_see_the_same_samples_and_all_see_each_once(run_ranks: RunRanks, folder: Path) -> None:
    for name, ranks in _train(run_ranks, folder, "two by two").items():
        assert ranks[0]["seen"] == ranks[1]["seen"], name
        assert ranks[2]["seen"] == ranks[3]["seen"], name
        epochs = CASES[name].get("epochs", 2)
        once = Counter((epoch, sample) for epoch in range(epochs) for sample in range(23))
        assert Counter(ranks[0]["seen"] + ranks[2]["seen"]) == once, name
        assert ranks[0]["random numbers"] == ranks[1]["random numbers"], name
        assert ranks[0]["evaluated"] == ranks[1]["evaluated"], name
        assert ranks[0]["evaluated"] + ranks[2]["evaluated"] == list(range(23)), name


def test_gradients_and_weights_are_those_of_one_process(run_ranks: RunRanks, folder: Path) -> None:
    one, four = _train(run_ranks, folder, "one rank"), _train(run_ranks, folder, "two by two")
    for name in SAME_ON_ONE_RANK:
        bound = 0.0 if name == "exact" else 1e-12
        for rank in range(4):
            for kind in ("gradients", "weights"):
                assert _apart(four[name][rank][kind], one[name][0][kind]) <= bound, (name, rank, kind)


def test_all_numbers_are_those_of_as_many_ranks_as_there_are_data_ranks(run_ranks: RunRanks, folder: Path) -> None:
    """BatchNorm's statistics, which depend on the split, too."""
    two, four = _train(run_ranks, folder, "two ranks"), _train(run_ranks, folder, "two by two")
    for name in CASES:
        for rank in range(4):
            ours, theirs = four[name][rank], two[name][rank // 2]
            assert ours["seen"] == theirs["seen"], name
            assert ours["random numbers"] == theirs["random numbers"], name
            for kind in ("gradients", "weights", "buffers"):
                assert _apart(ours[kind], theirs[kind]) <= 1e-14, (name, rank, kind)


def test_an_evaluation_counts_each_sample_once(run_ranks: RunRanks, folder: Path) -> None:
    one, four = _train(run_ranks, folder, "one rank"), _train(run_ranks, folder, "two by two")
    for name, ranks in four.items():
        for rank in ranks:
            assert rank["total"][1] == 23, name
            if name in SAME_ON_ONE_RANK:
                assert rank["total"] == pytest.approx(one[name][0]["total"], rel=1e-12), name


def test_losses_and_positions_are_those_of_one_process(run_ranks: RunRanks, folder: Path) -> None:
    _train(run_ranks, folder, "one rank"), _train(run_ranks, folder, "two by two")
    for name in SAME_ON_ONE_RANK:
        runs = [folder / f"{form} {name}" for form in ("one rank", "two by two")]
        losses = [_read_losses(run) for run in runs]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12), name
        manifests = [read_manifest(list_checkpoint_folders(run / "checkpoints")[-1]) for run in runs]
        for key in ("step", "epoch", "position"):
            assert manifests[0][key] == manifests[1][key], (name, key)


def _read_losses(run: Path) -> list[float]:
    [metrics] = run.glob("attempts/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("kind") == "step"]


def test_the_mesh_of_a_sharded_model_holds_the_data_ranks_only(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("layout_bodies:place", 4, {"out": str(tmp_path / "mesh")}).check()
    meshes = [torch.load(tmp_path / f"mesh-{rank}") for rank in range(4)]
    assert meshes == [[0, 2], [1, 3], [0, 2], [1, 3]]


@given(st.integers(1, 6), st.lists(st.integers(1, 4), max_size=3))
def test_every_rank_has_one_place_and_every_data_rank_as_many_ranks(data_size: int, sizes: list[int]) -> None:
    mesh = [(f"dimension {nth}", size) for nth, size in enumerate(sizes)]
    model_size = 1
    for size in sizes:
        model_size *= size
    layouts = [plan_layout(rank, data_size * model_size, mesh) for rank in range(data_size * model_size)]
    assert {layout.data_size for layout in layouts} == {data_size}
    assert {layout.model_size for layout in layouts} == {model_size}
    for layout in layouts:
        assert layout.rank in layout.ranks_of(layout.data_rank)
        assert layout.data_ranks[layout.data_rank] == layout.rank
        assert [other for other in layout.data_ranks if layouts[other].data_rank == layout.data_rank] == [layout.rank]
    assert sum(layout.is_counted for layout in layouts) == data_size


def test_without_a_model_mesh_the_data_rank_is_the_rank() -> None:
    for rank in range(3):
        layout = plan_layout(rank, 3)
        assert (layout.data_rank, layout.data_size, layout.is_counted) == (rank, 3, True)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ([("tensor", 3)], r"4 ranks cannot be divided into groups of 3 \(tensor 3\)"),
        ([("tensor", 0)], "mesh dimension tensor has size 0"),
        ([("data", 2)], "a dimension twice: data, data"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(mesh: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        plan_layout(0, 4, mesh)
