"""The way of the samples to the step: loader processes, and what moves to the device."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from hpcddp.training.data.loader import map_parts, move
from hpcddp.training.data.randomness import WorkerStart

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: Any
    b: Any


class Encoding:
    def to(self, device: torch.device) -> Encoding:
        return self


@dataclass
class Labelled:
    x: Any
    y: Any


def test_each_tensor_and_what_moves_itself_is_moved_and_all_else_stays() -> None:
    one, two, encoding = torch.zeros(1), torch.ones(1), Encoding()
    batch = {"x": (one, [two]), "pair": Pair(encoding, 3), "more": Labelled(one, 2), "name": "cat"}
    found: list[Any] = []
    changed = map_parts(batch, lambda part: found.append(part) or "moved")
    assert found == [one, two, encoding, one]
    assert changed == {"x": ("moved", ["moved"]), "pair": Pair("moved", 3), "more": Labelled("moved", 2), "name": "cat"}
    assert move((one, encoding), CPU)[0] is one


class Tied:
    """Garbage that says where it is destroyed, as a process group's threads would by a crash."""

    def __init__(self, told: Path) -> None:
        self.me, self.told, self.maker = self, told, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.maker:
            self.told.touch()


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_a_loader_process_destroys_nothing_that_it_has_from_its_rank(tmp_path: Path) -> None:
    gc.disable()
    try:
        Tied(tmp_path / "told")
        loader = DataLoader(
            Collecting(), num_workers=1, worker_init_fn=WorkerStart(None), multiprocessing_context="fork"
        )
        assert len(list(loader)) == 2
    finally:
        gc.enable()
    assert not (tmp_path / "told").exists()
