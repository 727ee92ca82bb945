"""A script has the same bytes whatever the terminal's encoding is, and people get an escape for what that lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli.streams import refusal

REQUEST = [
    "render",
    "--site",
    "local",
    "--ranks-per-node",
    "2",
    "--set",
    "run_dir=läufe",
    "--",
    "true",
    "データ/ç.py",
    "…",
]


def start(words: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "hpcddp", *words]
    return subprocess.run(argv, cwd=folder, env={"PATH": os.environ["PATH"], **env}, capture_output=True, check=False)


def test_a_script_is_the_same_whatever_the_terminals_encoding(tmp_path):
    text = start(REQUEST, tmp_path, PYTHONUTF8="1")
    assert "データ/ç.py".encode() in text.stdout
    assert start(REQUEST, tmp_path, PYTHONUTF8="1", PYTHONIOENCODING="ascii").stdout == text.stdout


def test_text_for_people_is_escaped(tmp_path):
    (tmp_path / "ç.sh").write_text("#!/bin/bash\n#PBS -l walltme=ç\n")
    done = start(["lint", "ç.sh"], tmp_path, PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.startswith(rb"\xe7.sh:1: ")) == (1, True)


@pytest.mark.parametrize("text", ["command: python ç.py\nsite: local\n", "command: [true]\nsite: ./ç.yaml\n"])
def test_where_python_itself_knows_only_ascii_a_job_that_needs_more_is_refused(text, tmp_path):
    (tmp_path / "ç.py").touch()
    (tmp_path / "job.yaml").write_text(text)
    done = start(["render", "job.yaml"], tmp_path, PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 2
    assert done.stdout.decode() == refusal()
    assert done.stderr.decode().endswith("\nhint: export PYTHONUTF8=1\n")
    assert "Traceback" not in done.stderr.decode()
