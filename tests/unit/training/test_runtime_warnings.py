"""What the runtime tells rank 0 of its host."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, torch, hpcddp
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with hpcddp.runtime(global_batch=2, backend="gloo") as rt:
    rt.loader(torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4)), num_workers=int(sys.argv[1]))
"""


def said_with(workers: int) -> str:
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(workers)]
    return subprocess.run(line, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True).stderr


def test_a_rank_bound_to_fewer_cpus_than_its_loader_wants_is_told() -> None:
    said = said_with(1)
    assert "hpcddp: warning: 1 loader processes and the rank itself share 1 CPUs; give each rank more" in said
    assert "warning" not in said_with(0)
