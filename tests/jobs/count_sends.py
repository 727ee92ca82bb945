"""Runs a script as a rank, and writes the shapes that it sent to others: count_sends.py FOLDER SCRIPT ARGUMENTS"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

folder, script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
    runpy.run_path(script, run_name="__main__")
shapes = [event.input_shapes[0] for event in seen.events() if event.name == "gloo:send"]
Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(shapes))
