"""The picture of a job that loses a host is drawn from its record."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path


def test_the_picture_is_that_of_the_recorded_job(repo: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_survival", repo / "docs/make_survival.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    recorded = json.loads((repo / "docs/survival.json").read_text())
    assert (repo / "docs/survival.svg").read_text() == maker.draw(recorded), "python docs/make_survival.py"
    first, second = recorded["attempts"]
    assert [step for step, _ in first + second] == list(range(1, second[-1][0] + 1))  # none is lost, or made twice
