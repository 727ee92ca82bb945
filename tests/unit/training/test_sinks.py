"""The numbers of `rt.log` in TensorBoard, MLflow and W&B.

TensorBoard is the real one. For MLflow and W&B there are stand-ins with the calls that hpcddp makes; they show that a
run is found again and what it is given, not that the services take it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcddp.errors import RequestError
from hpcddp.training import report
from hpcddp.training.report import SINKS, Sinks, choose_sinks


def test_what_is_asked_for_is_chosen_and_the_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: SimpleNamespace(name=name))
    assert choose_sinks(None, {}) == choose_sinks([], {"HPCDDP_LOG_TO": "tensorboard"}) == ()
    assert choose_sinks(None, {"HPCDDP_LOG_TO": "mlflow, wandb,mlflow"}) == ("mlflow", "wandb")
    assert choose_sinks(["wandb"], {"HPCDDP_LOG_TO": "mlflow"}) == ("wandb",)


def test_a_sink_that_is_unknown_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    for name, message in (
        (
            "tensorbord",
            "'tensorbord' is unknown (did you mean 'tensorboard'?)\nhint: one of tensorboard, mlflow, wandb",
        ),
        ("mlflow", f"mlflow is not installed for {sys.executable}\nhint: {sys.executable} -m pip install mlflow"),
    ):
        with pytest.raises(RequestError) as caught:
            choose_sinks(None, {"HPCDDP_LOG_TO": name})
        assert str(caught.value).startswith(f"HPCDDP_LOG_TO: {message}")


TENSORBOARD = """
import sys, warnings
warnings.simplefilter("ignore")  # TensorBoard's own
from hpcddp.training.report import Sinks
for first, last in ((0, 4), (2, 5)):  # the second attempt resumes from step 2
    opened = Sinks(["tensorboard"], sys.argv[1], first)
    for step in range(first + 1, last + 1):
        opened.write(step, {"score": step + first / 10})
    opened.close("unfinished")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard")
events.Reload()
print(*(f"{e.step}:{e.value:.1f}" for e in events.Scalars("score")))
"""


@pytest.mark.slow
def test_a_resumed_run_is_one_curve_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = subprocess.run([sys.executable, "-c", TENSORBOARD, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1:1.0", "2:2.0", "3:3.2", "4:4.2", "5:5.2"], done.stderr


class StandIn:
    """Records each call, and answers `search_runs` with the runs that were started."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.known: dict[str, str] = {}

    def search_runs(self, filter_string: str, **_: Any) -> list[Any]:
        known = [run for tag, run in self.known.items() if filter_string == f"tags.hpcddp_run = '{tag}'"]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in known]

    def start_run(self, run_id: str | None = None, run_name: str = "", tags: dict[str, str] | None = None) -> None:
        if tags is not None:
            self.known[tags["hpcddp_run"]] = f"id of {run_name}"
        self.calls.append(("start", run_id or run_name))

    def init(self, **given: Any) -> StandIn:
        self.calls.append(("init", given))
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, *given, *named.values()))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_resumed_run_is_the_same_run_in_mlflow_and_another_is_not(stand_in: StandIn, tmp_path: Path) -> None:
    for folder, status in (("a", "unfinished"), ("a", "finished"), ("b", "failed")):
        opened = Sinks(["mlflow"], str(tmp_path / folder))
        opened.write(3, {"score": 1.5})
        opened.close(status)
    assert stand_in.calls[::3] == [("start", "a"), ("start", "id of a"), ("start", "b")]
    assert stand_in.calls[1::3] == [("log_metrics", {"score": 1.5}, 3)] * 3
    assert stand_in.calls[2::3] == [("end_run", end) for end in ("KILLED", "FINISHED", "FAILED")]


def test_a_resumed_run_has_the_same_id_in_wandb_and_another_has_not(stand_in: StandIn, tmp_path: Path) -> None:
    for folder in ("a", "a/", "b"):
        opened = Sinks(["wandb"], f"{tmp_path}/{folder}")
        opened.write(3, {"score": 1.5})
        opened.close("finished")
    inits = [call[1] for call in stand_in.calls if call[0] == "init"]
    assert [given["name"] for given in inits] == ["a", "a", "b"]
    assert all(given["resume"] == "allow" for given in inits)
    assert inits[0]["id"] == inits[1]["id"] != inits[2]["id"]
    assert stand_in.calls[1:3] == [("log", {"score": 1.5, "step": 3}), ("finish", 0)]


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(stand_in, "log_metrics", refuse, raising=False)
    opened = Sinks(["mlflow", "wandb"], str(tmp_path))
    for step in (1, 2):
        opened.write(step, {"score": 1.0})
    opened.close("finished")
    assert capsys.readouterr().err == (
        "hpcddp: warning: mlflow failed and gets no more numbers (ConnectionError: no route to host)\n"
    )
    assert [call for call in stand_in.calls if call[0] == "log"] == [("log", {"score": 1.0, "step": n}) for n in (1, 2)]


def test_the_page_lists_every_sink(repo: Path) -> None:
    page = (repo / "docs/metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | `pip install {name}` |" in page for name in SINKS)
