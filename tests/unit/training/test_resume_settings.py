"""Resumed with other settings than those recorded: each is an error until it is accepted or kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

RunRanks = Callable[..., Any]


def step_lr(gamma: float) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma)


HALVED = step_lr(0.5)


class Seen(list[float]):
    """The learning rates of the attempt's steps, and more."""

    optimizer: torch.optim.Optimizer
    loader_first: list[int]


def attempt(
    folder: Path,
    *,
    steps: int,
    lr: float = 0.1,
    schedule: Callable[[Any], Any] | None = HALVED,
    decay: float = 0.0,
    batch: int = 4,
    samples: int = 40,
    layers: int = 1,
    dies: bool = False,
    loader_first: bool = True,
    epochs: int = 4,
    shuffle: bool = True,
    make: Any = torch.optim.SGD,
    **options: Any,
) -> Seen:
    """Train to this step and stop."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    optimizer = make(model.parameters(), lr=lr, weight_decay=decay)
    scheduler = schedule(optimizer) if schedule else None
    data = TensorDataset(torch.arange(2.0 * samples).view(-1, 2) / samples, torch.ones(samples, 2))
    seen = Seen()
    seen.optimizer, seen.loader_first = optimizer, []
    with hpcddp.runtime(run_dir=str(folder), **options) as rt:
        loader: Any = DataLoader(data, batch_size=batch, shuffle=shuffle)
        if loader_first:
            *_, loader = rt.prepare(model, optimizer, *((scheduler,) if scheduler else ()), loader)
        else:
            model = rt.wrap(model)
            rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
            loader = rt.loader(loader)
        for _ in rt.epochs(epochs):
            for batch in loader:
                seen.append(optimizer.param_groups[0]["lr"])
                seen.loader_first.append(loader.sampler.position)
                if dies:
                    raise RuntimeError("killed")
                optimizer.zero_grad()
                rt.train_step(batch, lambda micro: mse_loss(model(micro[0]), micro[1]))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                if rt.steps == steps - 1:
                    rt.stop("the test")
    return seen


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text())


def test_what_a_run_began_with_is_recorded(tmp_path: Path) -> None:
    attempt(tmp_path / "run", steps=2)
    settings = read(tmp_path / "run")["settings"]
    told = {name: settings["run"][name] for name in ("seed", "global_batch", "samples", "shuffle", "exact")}
    assert told == {"seed": 0, "global_batch": 4, "samples": 40, "shuffle": True, "exact": "no"}
    assert settings["model"] == {"parameters": ["0.weight 2x2", "0.bias 2"]}
    assert settings["optimizer"]["class"] == "SGD"
    assert settings["optimizer"]["parameters"] == ["model.0.weight", "model.0.bias"]
    assert settings["optimizer"]["lr"] == 0.1
    assert settings["scheduler"] == {"class": "StepLR", "step_size": 1, "gamma": 0.5}
    assert settings["run"]["command"]
    assert settings["run"]["owner"]


CHANGED: dict[str, Any] = {"lr": 0.4, "decay": 0.25, "schedule": step_lr(0.9), "batch": 8, "samples": 48, "seed": 7}


def test_all_differences_are_one_error_before_any_training(tmp_path: Path) -> None:
    attempt(tmp_path / "run", steps=2)
    before = read(tmp_path / "run")
    with pytest.raises(RequestError) as caught:
        attempt(tmp_path / "run", steps=3, **CHANGED)
    assert caught.value.message.partition("settings: ")[2].split("; ") == [
        "seed: 0 -> 7",
        "samples: 40 -> 48",
        "global_batch: 4 -> 8",
        "scheduler.gamma: 0.5 -> 0.9",
        "optimizer.lr: 0.1 -> 0.4",
        "optimizer.weight_decay: 0.0 -> 0.25",
    ]
    names = "seed,{}global_batch,gamma,lr,weight_decay"
    assert f'hpcddp.runtime(…, accept="{names.format("samples,")}") takes the new' in caught.value.hint
    assert f'hpcddp.runtime(…, keep="{names.format("")}") the recorded' in caught.value.hint
    with pytest.raises(RequestError, match=r'accept="lrr"\): the run has no such setting \(did you mean \'lr\'\?\)'):
        attempt(tmp_path / "run", steps=3, **CHANGED, accept=["lrr"])
    assert read(tmp_path / "run") == before
    assert attempt(tmp_path / "run", steps=3) == [0.025], "nothing was trained in between"


def test_accepted_settings_are_the_scripts_and_move_on_as_the_schedule_says(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path / "run", steps=2)
    accepted: dict[str, Any] = {"lr": 0.4, "decay": 0.25, "accept": ["lr", "weight_decay"]}
    capfd.readouterr()
    seen = attempt(tmp_path / "run", steps=3, **accepted)
    assert "hpcddp: optimizer.lr: 0.1 -> 0.4 (accepted)" in capfd.readouterr().err
    assert seen == [0.1]  # 0.4 * 0.5 ** 2
    assert seen.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert attempt(tmp_path / "run", steps=4, **accepted) == [0.05], "once"
    assert "(accepted)" not in capfd.readouterr().err
    assert read(tmp_path / "run")["settings"]["optimizer"]["lr"] == 0.4


def test_a_learning_rate_in_a_tensor_is_compared_as_its_number_and_stays_in_a_tensor(tmp_path: Path) -> None:
    def in_tensor(parameters: Any, lr: float, **options: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=torch.tensor(lr), **options)

    made: dict[str, Any] = {"make": in_tensor, "batch": 8}
    attempt(tmp_path / "run", steps=2, lr=0.5, **made)
    assert read(tmp_path / "run")["settings"]["optimizer"]["lr"] == 0.5
    with pytest.raises(RequestError, match=r"optimizer\.lr: 0\.5 -> 2\.0"):
        attempt(tmp_path / "run", steps=3, lr=2.0, **made)
    seen = attempt(tmp_path / "run", steps=3, lr=2.0, accept="lr", **made)
    for group in seen.optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor)
        assert float(group["lr"]) == 0.25  # 2 * 0.5 ** 3
    assert float(attempt(tmp_path / "run", steps=4, lr=2.0, **made).optimizer.param_groups[0]["lr"]) == 0.125


def test_kept_settings_are_the_recorded_ones_in_each_start(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole", steps=6)
    attempt(tmp_path / "run", steps=2)
    kept: dict[str, Any] = {
        **CHANGED,
        "samples": 40,
        "keep": ["lr", "weight_decay", "scheduler", "global_batch", "seed"],
    }
    parts = [attempt(tmp_path / "run", steps=4, **kept), attempt(tmp_path / "run", steps=6, **kept)]
    assert [*parts[0], *parts[1]] == whole[2:]
    ends = [json.loads((tmp_path / name / "state.json").read_text()) for name in ("whole", "run")]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert read(tmp_path / "run")["settings"]["optimizer"]["lr"] == 0.1


def test_an_accepted_value_is_not_lost_by_an_attempt_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    attempt(tmp_path / "run", steps=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            attempt(tmp_path / "run", steps=3, lr=0.4, accept="lr", dies=True)
    assert attempt(tmp_path / "run", steps=3, lr=0.4) == [0.1]


def test_a_run_without_a_checkpoint_begins_again_and_is_recorded_anew(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        attempt(tmp_path / "run", steps=3, lr=0.4, dies=True)
    assert attempt(tmp_path / "run", steps=1, lr=0.2, keep="lr") == [0.4], "but for what is kept"
    with pytest.raises(RuntimeError, match="killed"):
        attempt(tmp_path / "other", steps=3, lr=0.4, dies=True)
    attempt(tmp_path / "other", steps=2)
    assert read(tmp_path / "other")["settings"]["optimizer"]["lr"] == 0.1


SCHEDULES: dict[str, Callable[[int], Callable[[Any], Any]]] = {
    "one cycle": lambda total: lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=total),
    "warmup": lambda total: (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                lr_scheduler.CosineAnnealingLR(optimizer, total - 4),
            ],
            [4],
        )
    ),
}


@pytest.mark.parametrize("name", ["one cycle", "warmup"])
def test_an_accepted_schedule_is_built_anew_and_brought_to_the_runs_step(tmp_path: Path, name: str) -> None:
    schedule = SCHEDULES[name]
    whole = attempt(tmp_path / "whole", steps=40, schedule=schedule(40), epochs=4)
    attempt(tmp_path / "run", steps=20, schedule=schedule(20), epochs=2)
    with pytest.raises(RequestError, match="scheduler"):
        attempt(tmp_path / "run", steps=40, schedule=schedule(40))
    assert attempt(tmp_path / "run", steps=40, schedule=schedule(40), accept="scheduler") == whole[20:]


@pytest.mark.parametrize(
    ("changed", "loader_first"), [({"seed": 5}, True), ({"samples": 48}, False), ({"shuffle": False}, True)]
)
def test_an_accepted_seed_order_or_number_of_samples_begins_the_interrupted_epoch_again(
    tmp_path: Path, changed: dict[str, Any], loader_first: bool
) -> None:
    more: dict[str, Any] = {"loader_first": loader_first, "global_batch": 4}
    attempt(tmp_path / "run", steps=13, **more)
    with pytest.raises(RequestError, match=f"{next(iter(changed))}: "):
        attempt(tmp_path / "run", steps=14, **changed, **more)
    seen = attempt(tmp_path / "run", steps=15, **changed, **more, accept=[*changed])
    assert seen.loader_first == [0, 4]
    assert attempt(tmp_path / "run", steps=16, **changed, **more).loader_first == [8], "once"


def test_an_object_that_came_went_or_changed_its_class_is_accepted_with_its_own_state(tmp_path: Path) -> None:
    attempt(tmp_path / "run", steps=2)
    with pytest.raises(RequestError, match="scheduler: StepLR -> none"):
        attempt(tmp_path / "run", steps=3, schedule=None)
    assert attempt(tmp_path / "run", steps=3, schedule=None, accept="scheduler") == [0.025]
    attempt(tmp_path / "run", steps=4, schedule=None, accept="scheduler")  # which a restart of the job says again
    assert attempt(tmp_path / "run", steps=5, accept="scheduler") == [0.1]
    adam: dict[str, Any] = {"make": torch.optim.Adam, "accept": "class"}
    assert len(attempt(tmp_path / "run", steps=6, **adam).optimizer.state) == 2


def grouped(*kinds: int) -> Callable[..., torch.optim.Optimizer]:
    """Weights (2) and biases (1) in a group each, in this order."""

    def make(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.SGD([{"params": [p for p in every if p.dim() == kind]} for kind in kinds], **options)

    return make


SGD: Any = torch.optim.SGD
MOVED: dict[str, tuple[Any, Any, str]] = {
    "another order": (SGD, lambda all_of, **options: SGD([*all_of][::-1], **options), "optimizer.parameters: model.0."),
    "groups swapped": (grouped(2, 1), grouped(1, 2), "optimizer[1].parameters: model.0.bias"),
    "a group more": (SGD, grouped(2, 1), "optimizer[1]: none -> SGD"),
}


@pytest.mark.parametrize("name", MOVED)
def test_parameters_that_would_get_the_state_of_others_are_neither_accepted_nor_kept(tmp_path: Path, name: str) -> None:
    before, after, words = MOVED[name]
    attempt(tmp_path / "run", steps=2, make=before)
    with pytest.raises(RequestError) as refused:
        attempt(tmp_path / "run", steps=4, make=after)
    assert words in refused.value.message
    assert refused.value.hint.startswith("keep the parameters and their order as they were; a run of its own")


def test_an_exact_attempt_of_a_run_that_was_not_is_accepted_as_one_that_is_not_exact(
    tmp_path: Path, capfd: Any
) -> None:
    attempt(tmp_path / "run", steps=2)
    exact: dict[str, Any] = {"exact": True, "slices": 2}
    with pytest.raises(RequestError, match="exact: no -> tree, 2 slices"):
        attempt(tmp_path / "run", steps=3, **exact)
    attempt(tmp_path / "run", steps=3, **exact, accept="exact")
    assert "warning: the run is not exact: steps 1 to 2 were not exact" in capfd.readouterr().err
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["exact"]["deviations"] == ["steps 1 to 2 were not exact"]


def test_a_changed_script_is_a_line_while_the_run_is_unfinished_and_an_error_when_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    monkeypatch.setattr(sys, "orig_argv", ["python", str(script)])
    script.write_text("1")
    attempt(run, steps=2)
    script.write_text("2")
    attempt(run, steps=99)
    assert capfd.readouterr().err.count(f"hpcddp: {script} has changed; the run resumes with the new one\n") == 1
    assert attempt(run, steps=99) == []
    script.write_text("3")
    with pytest.raises(RequestError, match=r"is finished, and .*train.py has changed since\nhint: .* another run_dir"):
        attempt(run, steps=99)
    assert attempt(run, steps=99, accept="script") == []
    monkeypatch.setattr(sys, "orig_argv", ["python", str(script), "--new"])
    with pytest.raises(RequestError, match="command: none -> --new"):
        attempt(run, steps=99)


def test_the_ranks_all_raise_the_error_and_none_hangs(tmp_path: Path, run_ranks: RunRanks) -> None:
    run_ranks("checkpoint_bodies:train_with", 2, [str(tmp_path), {"lr": 0.1}]).check()
    outcome = run_ranks("checkpoint_bodies:train_with", 2, [str(tmp_path), {"lr": 0.2}])
    assert all(status not in (0, None) for status in outcome.statuses)
    assert all("optimizer.lr: 0.1 -> 0.2" in output for output in outcome.outputs)
    run_ranks("checkpoint_bodies:train_with", 2, [str(tmp_path), {"lr": 0.2, "keep": "lr"}]).check()
