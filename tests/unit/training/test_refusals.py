"""What rt.prepare, rt.backward, rt.log and rt.save_model refuse in two lines, and what they take."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError

RunRanks = Callable[..., Any]
DATA = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(7)), torch.arange(12) % 3)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_two_models_with_a_trained_parameter_in_common_are_refused() -> None:
    body = nn.Linear(4, 5)
    first, second = nn.Sequential(body, nn.Linear(5, 3)), nn.Sequential(body, nn.Linear(5, 1))
    with hpcddp.runtime(4) as rt, pytest.raises(RequestError, match=r"0\.weight of this Sequential is in another"):
        rt.prepare(first, second)
    body.requires_grad_(False)
    with hpcddp.runtime(4) as rt:
        rt.prepare(first, second)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda loss: loss, r"a tensor of shape \(4,\): .*\nhint: rt\.backward\(loss\.mean\(\)\)"),
        (lambda loss: loss.mean().item(), "rt.backward was given a float"),
        (lambda loss: loss.mean().detach(), "a tensor without a gradient"),
        (lambda loss: loss.mean().reshape(1), None),
    ],
    ids=["vector", "float", "detached", "one number"],
)
def test_a_backward_pass_starts_from_one_number(loss: Callable[[Any], Any], message: str | None) -> None:
    def run() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hpcddp.runtime() as rt:
            model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(DATA, 4))
            for _ in rt.epochs(1):
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(loss(cross_entropy(model(x), y, reduction="none")))
                    optimizer.step()

    if message is None:
        run()
        return
    with pytest.raises(RequestError, match=message):
        run()


@pytest.mark.parametrize(
    ("code", "kind"), [(0, RequestError), (None, RequestError), (1, SystemExit), ("no", SystemExit)]
)
def test_an_exit_inside_the_body_is_no_success(code: Any, kind: type[BaseException], tmp_path: Path) -> None:
    def run() -> None:
        with hpcddp.runtime(run_dir=str(tmp_path)) as rt:
            rt.prepare(DataLoader(DATA, 4))
            sys.exit(code)

    with pytest.raises(kind) as caught:
        run()
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"
    if kind is RequestError:
        assert "by sys.exit() after step 0, and the run is not finished\nhint: rt.finish_early" in str(caught.value)


def save_averaged_models(folder: str) -> None:
    """Made before rt.prepare and after it."""
    before = make_model()
    averages = [AveragedModel(before)]
    with hpcddp.runtime(4) as rt:
        model, averages[0] = rt.prepare(before, averages[0])
        averages.append(AveragedModel(model))
        for nth, average in enumerate(averages):
            rt.save_model(Path(folder, f"{nth}.pt"), average)


@pytest.mark.parametrize("ranks", [1, 2])
def test_averaged_weights_are_saved_for_the_plain_model(ranks: int, run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("test_refusals:save_averaged_models", ranks, str(tmp_path)).check()
    for nth in range(2):
        plain = make_model()
        expected = copy.deepcopy(plain.state_dict())
        plain.load_state_dict(torch.load(tmp_path / f"{nth}.pt", weights_only=True))
        assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
