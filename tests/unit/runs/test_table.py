"""`hpcddp.load`: a run's numbers as rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcddp
from hpcddp.errors import RequestError


def write_attempt(run: Path, name: str, lines: list[dict[str, Any]]) -> None:
    folder = run / "attempts" / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(*numbers: int, loss: float, time: float) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": step, "loss": loss, "time": time + step} for step in numbers]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed after step 5, resumed from step 3."""
    first = steps(1, 2, 3, 4, 5, loss=1.0, time=100)
    first.insert(3, {"kind": "log", "step": 3, "score": 0.5, "time": 103.5})
    first.append({"kind": "log", "step": 5, "score": 0.9, "time": 105.5})
    second = steps(4, 5, 6, loss=2.0, time=200)
    second.append({"kind": "log", "step": 6, "score": 0.7, "other": None, "time": 206.5})
    write_attempt(tmp_path / "train", "9.killed", first)
    write_attempt(tmp_path / "train", "10.resumed", second)
    return tmp_path / "train"


def test_a_step_that_was_made_again_counts_once_as_it_was_made_last(run: Path) -> None:
    rows = hpcddp.load(str(run))
    assert [(row["step"], row["loss"], row["attempt"]) for row in rows] == [
        (1, 1.0, "9.killed"),
        (2, 1.0, "9.killed"),
        (3, 1.0, "9.killed"),
        (4, 2.0, "10.resumed"),
        (5, 2.0, "10.resumed"),
        (6, 2.0, "10.resumed"),
    ]
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_what_was_logged_after_a_step_that_was_made_again_is_gone(run: Path) -> None:
    assert hpcddp.load(str(run), "log") == [
        {"step": 3, "score": 0.5, "time": 103.5},
        {"step": 6, "score": 0.7, "other": None, "time": 206.5},
    ]


def test_another_kind_and_a_folder_that_is_no_run_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="kind 'steps' is unknown \\(did you mean 'step'"):
        hpcddp.load(str(run), "steps")
    with pytest.raises(RequestError, match="is no run folder"):
        hpcddp.load(str(tmp_path))


def test_tab_completion_shows_the_api_and_loads_nothing() -> None:
    text = "import sys, hpcddp; print(sorted(set(dir(hpcddp)) & set(sys.argv[1:])), 'hpcddp.api' in sys.modules)"
    names = ["Job", "env", "init", "integrations", "load", "runtime", "__version__"]
    done = subprocess.run([sys.executable, "-c", text, *names], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sorted(names)} False"
    assert set(names) == set(hpcddp.__all__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((None,), "run None is not the path of a run folder"), (("x", None), "kind None is unknown")],
)
def test_what_is_no_text_is_refused_in_two_lines(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        hpcddp.load(*arguments)
