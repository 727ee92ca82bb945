"""A run with a file of another schema is refused, and every byte of it stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import hpcddp
from hpcddp.runs.jsonfile import SchemaError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(tmp_path / "train"))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "41.1")
    return tmp_path / "train"


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below it; None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _train() -> None:
    with hpcddp.runtime(global_batch=8, seed=3, save_every=1, keep_checkpoints=3) as rt:
        loader = rt.loader(TensorDataset(torch.zeros(16, 4), torch.zeros(16)))
        model = torch.nn.Linear(4, 2)
        model, optimizer = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in rt.epochs(1):
            for x, _ in loader:
                optimizer.zero_grad()
                rt.backward(model(x).sum(), summed=True)
                optimizer.step()


@pytest.mark.parametrize("name", ["run.json", "state.json"])
def test_a_run_of_another_schema_is_refused_and_every_byte_of_it_stays(run: Path, name: str) -> None:
    _train()
    (run / name).write_text(json.dumps({"schema": 2}))
    before = _contents(run)
    with pytest.raises(SchemaError, match=f"{name} has schema 2, and this hpcddp reads schema 1"):
        _train()
    assert _contents(run) == before


def test_a_schema_that_is_found_later_does_not_make_the_run_a_failed_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train()
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42.1")
    before = (run / "state.json").read_bytes()
    with pytest.raises(SchemaError), hpcddp.runtime(global_batch=8, run_dir=str(run)):
        raise SchemaError("manifest.json has schema 2", "use the hpcddp that wrote it")
    assert (run / "state.json").read_bytes() == before
