"""Run folders that hpcddp 0.1 wrote, to read, to change and to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.runs.folder import RunFolder

_OLD = Path(__file__).parents[2] / "captures" / "runs-0.1"


@pytest.fixture
def old_run(tmp_path: Path) -> Callable[[str], RunFolder]:
    """A copy of one of hpcddp 0.1's run folders: single, sharded, async, exact or chain."""
    return lambda name: RunFolder(str(shutil.copytree(_OLD / name, tmp_path / name)))
