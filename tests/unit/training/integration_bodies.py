"""What the ranks of the tests of hpcddp.integrations run: a loop of its own that stops, saves and resumes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpcddp.integrations


def loop(argument: dict[str, Any]) -> None:
    """`steps`: of the whole run; `signal`: [rank, step, name]; `fail`: [rank, where]; further: the loop's options."""
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    made = []

    def save(folder: Path) -> None:
        if argument.get("fail") == [rank, "save"]:
            raise OSError("no room")
        (folder / f"{rank}.txt").write_text(str(made[-1]))

    with hpcddp.integrations.loop(**argument.get("options", {})) as run:
        resumed = run.resume and [run.step, sorted(path.name for path in run.resume.iterdir())]
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for step in range(run.step + 1, argument["steps"] + 1):
            if argument.get("fail") == [rank, step]:
                raise ValueError("no sense")
            if argument.get("fail") == [rank, "leaves"] and step == 5:
                break
            optimizer.step()
            made.append(step)
            if argument.get("signal", [])[:2] == [rank, step]:
                signal.raise_signal(signal.Signals[argument["signal"][2]])
            run.after_step(step + rank if argument.get("fail") == [rank, "count"] else step, save)
    found = {"made": made, "stopped": run._run.stop_reason is not None, "resumed": resumed}
    Path(argument["folder"], f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
