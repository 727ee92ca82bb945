"""What a loop of the user's own prints on stderr, and where its numbers go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.training import report


class Recorder:
    """A sink that notes what it gets."""

    def __init__(self, step: int) -> None:
        self.opened_at = step
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed: list[str] = []

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.written.append((step, dict(numbers)))

    def close(self, status: str) -> None:
        self.closed.append(status)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    opened: list[Recorder] = []

    def make(_folder: str, step: int) -> Any:
        opened.append(Recorder(step))
        return opened[-1]

    monkeypatch.setitem(report.SINKS, "json", make)  # a package that is there
    return opened


def train(run_dir: Path | None, *, epochs: int = 2, fails: bool = False, **options: Any) -> None:
    """Three steps an epoch."""
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.ones(6, 1))
    with hpcddp.runtime(run_dir=str(run_dir) if run_dir else None, **options) as rt:
        model, optimizer, loader = rt.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)
        )
        for epoch in rt.epochs(epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                rt.backward(mse_loss(model(x), x))
                optimizer.step()
            rt.log(score=torch.tensor(float(epoch)))
            rt.print(f"epoch {epoch}")
            if fails:
                raise ValueError("bad")


def test_a_run_says_its_plan_at_the_start_and_what_came_of_it_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "toy")
    said = capsys.readouterr()
    assert said.out == "epoch 0\nepoch 1\n"
    lines = said.err.splitlines()
    assert [line.partition(";")[0] for line in lines[:2]] == [
        f"hpcddp: run {tmp_path / 'toy'}: new",
        "hpcddp: global batch: 2 = 1 rank x 2 x 1",
    ]
    assert lines[2] == "hpcddp: run toy: finished after step 6, epoch 2"
    assert [line.split()[0] for line in lines[3:]] == ["loss", "speed", "weights", "saved", "files"]


def test_a_loop_of_ones_own_shows_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCDDP_PROGRESS", "1e-9")
    train(None)
    shown = [line.split("  ") for line in capsys.readouterr().err.splitlines() if line.startswith("hpcddp: step")]
    assert [parts[0] for parts in shown] == [f"hpcddp: step {step}/6" for step in range(2, 7)]
    assert all(parts[1].startswith("loss ") for parts in shown)


def test_logged_numbers_go_to_the_file_and_to_what_was_asked_for(tmp_path: Path, recorders: list[Recorder]) -> None:
    train(tmp_path / "toy", log_to=["json"])
    assert [row["score"] for row in hpcddp.load(str(tmp_path / "toy"), "log")] == [0.0, 1.0]
    [recorder] = recorders
    assert recorder.written == [(3, {"score": 0.0}), (6, {"score": 1.0})]
    assert (recorder.opened_at, recorder.closed) == (0, ["finished"])


def test_a_failed_run_is_failed_everywhere(tmp_path: Path, recorders: list[Recorder]) -> None:
    with pytest.raises(ValueError, match="bad"):
        train(tmp_path / "toy", fails=True, log_to=["json"])
    assert recorders[0].closed == ["failed"]
