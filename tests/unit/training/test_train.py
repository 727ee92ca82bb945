"""The reference trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.cli.train import build_parser
from hpcddp.errors import RequestError
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.state import read_planned_batch

RunRanks = Callable[..., Any]
SMALL = ["--model", "shufflenet_v2_x0_5", "--image-size", "16", "--global-batch", "100", "--epochs", "1"]


def test_two_ranks_train_the_digits_and_leave_everything_in_the_run_folder(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = run_ranks("train_reference", 2, [*SMALL, "--run-dir", str(tmp_path), "--max-micro-batch", "25"]).check()
    assert "global batch: 100 = 2 ranks x 25 x 2" in outcome.outputs[0]
    assert f"hpcddp: run {tmp_path.name}: finished after step 15, epoch 1\n" in outcome.outputs[0]
    assert "test accuracy " in outcome.outputs[0]
    assert outcome.outputs[1] == ""
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "finished"
    assert (tmp_path / "checkpoints" / "step-00000015" / "manifest.json").exists()
    (attempt,) = (tmp_path / "attempts").iterdir()
    lines = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 16))
    assert ["test_acc" in line for line in lines if line["kind"] == "log"] == [True]
    versions = json.loads((attempt / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert len(versions["ranks"]) == 2


@pytest.mark.parametrize("plan", ["{", '{"global_batch": "many"}'])
def test_a_damaged_plan_is_named(tmp_path: Path, plan: str) -> None:
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(RequestError, match=r"plan\.json .*\nhint: look at it: head "):
        read_planned_batch(RunFolder(str(tmp_path)))


def test_a_model_that_is_none_is_told_once_and_ends_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = run_ranks("train_reference", 2, ["--model", "resnet81", "--run-dir", str(tmp_path)])
    assert sorted(outcome.statuses) in ([2, 2], [2, 6])
    told = "".join(outcome.outputs)
    assert told.count("is no classification model") == 1
    assert "did you mean 'resnet18'" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        *(("--lr", value, f"'{value}' is not a number above 0") for value in ("x", "nan", "0", "-1")),
        ("--epochs", "0", "--epochs '0' is not a whole number of 1 or more"),
        *(("--seed", value, f"'{value}' is not a whole number of 0 or more") for value in ("1.5", "-1")),
    ],
)
def test_a_number_that_no_training_takes_is_refused(option: str, value: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        build_parser().parse_args([option, value])


def test_help_needs_no_torch() -> None:
    code = "import sys; from hpcddp.cli.train import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_parts_of_a_model_train_and_go_on_as_a_whole(run_ranks: RunRanks, tmp_path: Path) -> None:
    options = [*SMALL, "--run-dir", str(tmp_path), "--parallel", "fsdp"]
    run_ranks("train_reference", 3, [*options, "--limit-steps", "2"]).check()
    outcome = run_ranks("train_reference", 2, [*SMALL, "--run-dir", str(tmp_path), "--limit-steps", "3"]).check()
    assert "unfinished" in outcome.outputs[0]
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 5
    run_ranks("train_reference", 3, options).check()
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "finished"
