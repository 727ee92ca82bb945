"""`hpcddp verify` of scripts without a word of hpcddp: what the ranks' optimizers see is compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
VERIFY = [sys.executable, "-m", "hpcddp", "verify", "--steps", "3", "--", sys.executable, "train.py", "."]
SAME = "train.py: on 2 ranks, gradients and weights are the same on both (3 steps)"


@pytest.mark.parametrize(
    ("program", "mistake", "status", "says"),
    [
        ("plain_ddp", ("", ""), 0, SAME),
        ("accelerate_loop", ("", ""), 0, SAME),
        ("accelerate_loop", ("prepare(model, opt", "prepare(torch.nn.Linear(1, 1), opt"), 1, "is not wrapped"),
        ("hf_trainer", ("", ""), 0, SAME),
    ],
    ids=["DDP", "Accelerate", "Accelerate, another model prepared", "Trainer"],
)
def test_the_ranks_of_an_unchanged_script_are_compared(program, mistake, status, says, run, tmp_path):
    text = (PROGRAMS / f"{program}.py").read_text()
    if mistake[0]:
        text = text.replace("model, optimizer, loader = acc", "_, optimizer, loader = acc").replace(*mistake)
    (tmp_path / "train.py").write_text(text)
    done = run(
        VERIFY, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}, cwd=tmp_path
    )
    assert says in done.stdout, done.stdout + done.stderr
    assert done.returncode == status
