"""While a checkpoint's files are written or read, a rank says that it is at work: the disk may take minutes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcddp.training import watchdog
from hpcddp.training.checkpoint import files, sharded


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """At each `fsync` and each look into a file of tensors: whether the rank says that it is there."""
    noted = list[bool]()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            noted.append(watchdog.is_at_files())
            return call(*given, **named)

        return noting

    monkeypatch.setattr(os, "fsync", watched(os.fsync))
    monkeypatch.setattr(torch, "load", watched(torch.load))
    return noted


def write(folder: Path) -> Path:
    partial = files.begin_checkpoint(folder, 3)
    assert partial is not None
    return files.commit(partial, {"state.pt": files.write_state_file(partial, {"step": 3})}, {})


def test_a_checkpoint_of_one_file_is_written_and_read(tmp_path: Path, noted: list[bool]):
    path = write(tmp_path)
    assert len(noted) >= 3  # the file, the manifest, the folders
    writes = len(noted)
    assert files.read_checkpoint(path) == {"step": 3}
    assert len(noted) == writes + 1
    assert all(noted)
    assert not watchdog.is_at_files()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.6 warns of its own code
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process, without a group
def test_a_checkpoint_in_parts_is_written_and_read(tmp_path: Path, noted: list[bool]):
    sharded.write_tensors(tmp_path, {"weights": torch.arange(4.0)})
    writes = len(noted)
    assert writes >= 2  # the tensors, the index
    room = {"weights": torch.zeros(4)}
    sharded.read_tensors(tmp_path, room)
    assert room["weights"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(noted) > writes
    assert all(noted)


def test_a_whole_model_is_written(tmp_path: Path, noted: list[bool]):
    alone: Any = SimpleNamespace(is_first=True, world_size=1, device=torch.device("cpu"))
    files.write_whole(torch.nn.Linear(2, 1), tmp_path / "model.pt", alone)
    assert noted == [True]
