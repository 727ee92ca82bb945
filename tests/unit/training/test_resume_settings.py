"""Resumed with other settings than the first attempt's: each is named, with the value that is in force."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hpcddp
from hpcddp.errors import RequestError


def attempt(
    folder: Path,
    *,
    steps: int,
    lr: float = 0.1,
    gamma: float = 0.5,
    decay: float = 0.0,
    batch: int = 4,
    data: Any = None,
    loader_first: bool = True,
    schedule: bool = True,
    **options: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    """Train to this step of one epoch and stop."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma) if schedule else None
    data = TensorDataset(torch.ones(40, 2), torch.ones(40, 1)) if data is None else data
    with hpcddp.runtime(run_dir=str(folder), **options) as rt:
        if loader_first:
            others = (scheduler,) if schedule else ()
            *_, loader = rt.prepare(model, optimizer, *others, DataLoader(data, batch_size=batch))
        else:
            model = rt.wrap(model)
            rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
            loader = rt.loader(DataLoader(data, batch_size=batch))
        found = optimizer.param_groups[0]["lr"]
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(mse_loss(model(x), y))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                if rt.steps == steps - 1:
                    rt.stop("the test")
    return optimizer, found


def test_what_is_not_prepared_any_more_is_named(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    capfd.readouterr()
    attempt(tmp_path / "run", steps=3, schedule=False)
    line = "hpcddp: resumed at step 2: the checkpoint has scheduler (StepLR), which rt.prepare was not given now;"
    assert line in capfd.readouterr().err


def test_changed_settings_are_named_and_the_checkpoints_are_in_force(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    capfd.readouterr()
    optimizer, lr = attempt(tmp_path / "run", steps=3, lr=0.4, decay=0.25, gamma=0.9, batch=8)
    told = capfd.readouterr().err
    assert "resumed at step 2: optimizer's lr 0.1 -> 0.4; the checkpoint's 0.1 is in force, hpcddp.runtime(over" in told
    assert "resumed at step 2: optimizer's weight_decay 0.0 -> 0.25; the checkpoint's 0.0 is in force" in told
    assert "resumed at step 2: scheduler's gamma 0.5 -> 0.9; the checkpoint's 0.5 is in force" in told
    assert "resumed at step 2: the run's global batch 4 -> 8; the script's 8 is in force" in told
    assert (lr, optimizer.param_groups[0]["weight_decay"]) == (0.025, 0.0)


def test_the_same_settings_are_not_mentioned_also_when_a_scheduler_has_moved_them(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    capfd.readouterr()
    attempt(tmp_path / "run", steps=3)
    assert "resumed at" not in capfd.readouterr().err


def test_what_the_script_overrides_is_the_scripts_and_moves_on_as_the_schedule_says(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    capfd.readouterr()
    changed: dict[str, Any] = {"lr": 0.4, "decay": 0.25, "override": ["lr", "weight_decay"]}
    optimizer, lr = attempt(tmp_path / "run", steps=3, **changed)
    assert "lr 0.1 -> 0.4; the script's 0.4 is in force" in capfd.readouterr().err
    assert (lr, optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.25)  # 0.4 * 0.5 ** 2
    assert optimizer.param_groups[0]["lr"] == 0.05
    _, lr = attempt(tmp_path / "run", steps=4, **changed)  # once is enough
    assert lr == 0.05
    assert "resumed at" not in capfd.readouterr().err


def test_an_override_of_no_setting_is_refused(tmp_path: Path) -> None:
    attempt(tmp_path / "run", steps=2)
    with pytest.raises(RequestError, match=r"override='momentun' is no setting.*(?s:.*)did you mean 'momentum'"):
        attempt(tmp_path / "run", steps=3, override="momentun")


def test_an_exact_attempt_of_a_run_that_was_not_says_that_the_run_is_not_exact(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    capfd.readouterr()
    attempt(tmp_path / "run", steps=3, exact=True, slices=2)
    assert "warning: the run is not exact: steps 1 to 2 were not exact" in capfd.readouterr().err
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["exact"]["deviations"] == ["steps 1 to 2 were not exact"]


_NOISE = random.Random(1)  # of all data sets: each draws other numbers


class Rows(Dataset[Any]):
    """Of ones, and of random numbers of its own if there is noise."""

    def __init__(self, noise: float = 0.0, factor: float = 1.0) -> None:
        self._noise, self._factor = noise, factor

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = self._noise * _NOISE.random() + 0.1 * float(torch.rand(()))
        return torch.full((2,), self._factor + drawn), torch.ones(1)


@pytest.mark.parametrize("loader_first", [True, False])
def test_other_data_of_the_same_length_are_named(tmp_path: Path, capfd: Any, loader_first: bool) -> None:
    attempt(tmp_path / "run", steps=2, data=Rows())
    options: dict[str, Any] = {"loader_first": loader_first, "global_batch": 4}
    told = []
    for steps, factor in ((3, 2.0), (4, 2.0), (5, 2.0 + 1e-6)):
        capfd.readouterr()
        attempt(tmp_path / "run", steps=steps, data=Rows(factor=factor), **options)
        told.append([line for line in capfd.readouterr().err.splitlines() if "resumed at" in line])
    assert told[0] == [
        "hpcddp: resumed at step 2: this Rows is not the checkpoint's data, its first, middle or last sample is"
        " another; the script's is in force"
    ]
    assert told[1:] == [[], []], "the same data, and data that were rounded in another way"


def test_data_that_are_drawn_anew_each_time_are_not_compared(tmp_path: Path, capfd: Any) -> None:
    for steps in (2, 3):
        attempt(tmp_path / "run", steps=steps, data=Rows(noise=1.0))
    assert "resumed at" not in capfd.readouterr().err
