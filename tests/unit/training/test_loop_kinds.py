"""Every kind of training loop gives the weights of one process with the whole batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .kind_bodies import KINDS, MODES, train_plainly

RunRanks = Callable[..., Any]
CLOSE = 1e-12


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """The weights of each kind, by hand."""
    return {kind: train_plainly(kind) for kind in KINDS}


def train(run_ranks: RunRanks, ranks: int, out: Path, modes: list[str]) -> dict[Any, Any]:
    outcome = run_ranks("kind_bodies:train_kinds", ranks, {"out": str(out), "modes": modes}).check()
    assert "warning" not in "".join(outcome.outputs).lower()
    found: dict[Any, Any] = torch.load(out)
    return found


def test_every_kind_of_loop_trains_as_one_process_does_on_any_number_of_ranks_and_exactly_to_the_bit(
    run_ranks: RunRanks, tmp_path: Path, plain: dict[str, Tensor]
) -> None:
    modes = {1: ["exact"], 2: ["whole", "exact"], 3: ["micro batches"]}  # test_loop.py: one rank in the other modes
    assert {mode for some in modes.values() for mode in some} == MODES.keys()
    found = {ranks: train(run_ranks, ranks, tmp_path / f"{ranks}.pt", some) for ranks, some in modes.items()}
    for ranks, weights in found.items():
        wrong = {
            case: what if isinstance(what, str) else float((what - plain[case[0]]).abs().max())
            for case, what in weights.items()
            if isinstance(what, str) or not torch.allclose(what, plain[case[0]], rtol=0, atol=CLOSE)
        }
        assert wrong == {}, ranks
    exact = [case for case in found[2] if case[1] == "exact"]
    assert len(exact) >= 19
    assert [case for case in exact if not torch.equal(found[1][case], found[2][case])] == []
