"""Frameworks as they are, in an environment of their own: `make test-all-frameworks`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

# Elsewhere there is nothing to test: the packages are no dependency of the project.
collect_ignore_glob = [] if importlib.util.find_spec("accelerate") else ["test_*.py"]


@pytest.fixture
def check_world() -> Callable[[Path, int], None]:
    """Whether the ranks' files tell of one world of this size, which has seen each of the 48 samples once."""

    def check(folder: Path, size: int) -> None:
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
        assert [rank["world_size"] for rank in ranks] == [size] * size
        assert sorted(sample for rank in ranks for sample in rank["seen"]) == list(range(48))
        assert {len(rank["seen"]) for rank in ranks} == {48 // size}

    return check
