"""A run folder to read, to change and to damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.runs.folder import RunFolder
from tests.unit.chain_run import write_chain_run


@pytest.fixture
def chain_run(tmp_path: Path) -> RunFolder:
    """Two jobs of a chain of three, the second of which has queued 43.pbs1."""
    return write_chain_run(tmp_path / "chain")
