"""Every python block of README.md and docs/ that opens `hpcddp.runtime` is a whole script and trains to its end.

Fragments show lines inside such a `with` body. They do not open it, and test_blocks.py checks their names.
"""

from __future__ import annotations

import sys


def test_a_python_block_that_opens_the_runtime_trains_to_its_end(training_block, run, tmp_path):
    (tmp_path / "train.py").write_text(training_block.text, encoding="utf-8")
    done = run([sys.executable, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, f"{training_block.text}\n{done.stdout}\n{done.stderr}"
    assert "hpcddp: training: finished after step" in done.stdout + done.stderr, done.stdout
