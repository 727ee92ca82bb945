"""The best checkpoint by a number of the user's stays; a compiled model is saved as the plain one."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.checkpointer import check_same_value


def train(
    run_dir: Path | None, values: Sequence[float], *, mode: str = "max", compiled: bool = False, inside: bool = False
) -> list[bool]:
    """One epoch of two steps for each value; returns what rt.save_best said."""
    model: nn.Module = nn.Linear(1, 1)
    if compiled:
        model = torch.compile(model, backend="eager")
    said = []
    with hpcddp.runtime(run_dir=str(run_dir) if run_dir else None, keep_checkpoints=1) as rt:
        model, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(4, 1)), 2)
        )
        for epoch in rt.epochs(len(values)):
            for (x,) in loader:
                optimizer.zero_grad()
                rt.backward(mse_loss(model(x), x))
                optimizer.step()
                if inside:
                    rt.save_best(1.0)
            said.append(rt.save_best(values[epoch], mode))
        if compiled and run_dir:
            rt.save_model(run_dir / "model.pt")
    return said


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(name for name in os.listdir(run_dir / "checkpoints") if name.startswith("step-"))


def test_the_best_checkpoint_stays_beside_the_newest_and_a_resumed_run_knows_its_value(tmp_path: Path) -> None:
    assert train(tmp_path / "run", [1.0, 3.0, 2.0, float("nan")]) == [True, True, False, False]
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000008"]
    (tmp_path / "run/state.json").unlink()  # as if it had not come to its end
    assert train(tmp_path / "run", [0, 0, 0, 0, 2.5, 4.0]) == [False, True]
    assert checkpoints(tmp_path / "run")[-1] == "step-00000012"


def test_the_smallest_is_the_best_if_that_is_asked_for_also_without_a_run_folder() -> None:
    assert train(None, [1.0, 3.0, 0.5], mode="min") == [True, False, True]


def test_a_damaged_best_file_is_refused_before_the_run_trains(tmp_path: Path) -> None:
    train(tmp_path / "run", [1.0])
    (tmp_path / "run/checkpoints/best.json").write_text("{")
    with pytest.raises(RequestError, match=r"best\.json cannot be read"):
        train(tmp_path / "run", [1.0, 2.0])


@pytest.mark.parametrize(
    "values", [(0.2, 0.2), (0.2, 0.2001), (0.2, 0.0), (0.2, math.nan), (0.2, math.inf), (math.nan, 1)]
)
def test_the_ranks_give_the_same_value_or_none(values: tuple[float, float]) -> None:
    check_same_value(values)


def test_a_value_of_each_ranks_own_share_of_the_data_is_refused() -> None:
    with pytest.raises(RequestError, match=r"got 0.208333 on rank 0 and 0.166667 on rank 2") as refused:
        check_same_value([5 / 24, 5 / 24, 4 / 24])
    assert "rt.sum(correct)" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mode": "most"}, r"rt.save_best\(value, 'most'\) cannot be"), ({"inside": True}, "inside the loop")],
)
def test_what_cannot_be_the_best_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        train(None, [1.0], **options)  # type: ignore[arg-type]  # the two cases have other keys


@pytest.mark.slow
def test_a_compiled_model_trains_and_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    train(tmp_path / "run", [1.0], compiled=True)
    nn.Linear(1, 1).load_state_dict(torch.load(tmp_path / "run/model.pt"))
    state = torch.load(tmp_path / "run/checkpoints/step-00000002/state.pt")
    assert list(state["model"]) == ["weight", "bias"]
