"""On a login node that everybody shares, `env`, `exec` and `--help` load next to nothing."""

from __future__ import annotations

import sys

import pytest

# Not ours, or a quarter of the start each.
HEAVY = {"jinja2", "yaml", "torch", "numpy", "mpi4py", "dataclasses", "inspect", "pathlib", "logging"}
PROGRAM = """
import sys
before = set(sys.modules)  # what .pth files of the virtual environment loaded
from hpcddp.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}), file=sys.stderr)
"""


LIGHT = [["env"], ["env", "--json"], ["status", "."], ["--help"], ["--version"]]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_a_light_verb_loads_nothing_heavy(arguments, run):
    done = run([sys.executable, "-c", PROGRAM, *arguments])
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "hpcddp" in loaded, done.stderr
    assert not loaded & HEAVY
