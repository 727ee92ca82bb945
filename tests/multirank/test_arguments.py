"""Arguments reach a program byte for byte, also through a launcher that fills `$NAME` in them; its rank is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multirank

ARGUMENTS = ["$$", "${local_rank}", "$local_rank", "$HOME", "${x}", "$", "$$$", "it's", "a b", "{{x}}", "\\$", "é"]
PROGRAM = """
import hpcddp, json, os, sys
here = hpcddp.env()
open('said-' + os.environ['RANK'], 'w').write(json.dumps([here.launcher, here.rank, *sys.argv[1:]]))
"""


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi"])
def test_every_argument_is_as_it_was_typed(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["python", "program.py", *ARGUMENTS]
    request = ["--site", "local", "--launcher", launcher, "--ranks-per-node", "2", "--name", "a", "--", *command]
    render = [sys.executable, "-m", "hpcddp", "render", *request]
    script = subprocess.run(render, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"said-{rank}").read_text()) == [launcher, rank, *ARGUMENTS]
