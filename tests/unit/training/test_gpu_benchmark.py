"""benchmarks/gpu.py on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu.py"


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_two_lines_and_exits_2() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    first, hint = done.stderr.splitlines()[-2:]
    assert "no CUDA device" in first
    assert hint.startswith("hint: ")


@pytest.mark.slow
def test_a_dry_run_says_that_it_is_one_and_its_parts_end_well(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--device", "cpu", "--tiny", "--only", "exact", "exact-2"]
    command += ["--out", tmp_path / "found"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "A DRY RUN" in done.stdout
    found = json.loads((tmp_path / "found").read_text())
    assert (found["exact"]["ranks"], found["exact-2"]["ranks"]) == (1, 2)
    assert found["exact"]["weights"] == found["exact-2"]["weights"]


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no CUDA device")
@pytest.mark.parametrize("part", ["alone", "exact", "exact-2", "saves", "amp", "compile", "launch"])
def test_a_gpu_passes_each_check(part: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--only", part], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
