"""Buffers that differ from rank to rank are averaged; what is alike stays as it is to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., Any]


@pytest.mark.slow
def test_only_what_differs_between_ranks_is_averaged(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("checkpoint_bodies:average_some", 3, str(tmp_path)).check()
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["alike"] == [0.1, 1e308, 0.7]  # in float64 neither 0.1 * 3 / 3 is 0.1, nor has 3e308 a number
        assert found["mask"] == [0.0, float("-inf")]
        assert found["count"] == rank
        assert found["own"] == pytest.approx([1.0, 5.0])
