"""Warnings of the runtime about the host of rank 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, torch, hpcddp
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for workers in 0, 1:
    with hpcddp.runtime(global_batch=2, backend="gloo") as rt:
        data = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4))
        rt.loader(data, num_workers=workers)
    print("--", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_rank_with_fewer_cpus_than_its_loader_needs_prints_a_warning() -> None:
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(line, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    none, one, _ = done.stderr.split("--\n")
    assert "warning" not in none
    assert "hpcddp: warning: 1 loader process and the rank itself share 1 CPU; give each rank more" in one
