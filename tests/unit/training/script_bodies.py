"""Ranks that run a training script as `python script.py` would."""

from __future__ import annotations

import os
import runpy


def run_script(argument: dict[str, str]) -> None:
    """In argument["folder"]; what goes to stderr is left there, one file for each rank."""
    os.chdir(argument["folder"])
    stderr = os.open(f"stderr-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)
    os.close(stderr)
    runpy.run_path(argument["script"], run_name="__main__")
