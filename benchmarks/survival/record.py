"""The times of a real job that loses a host and goes on, for docs/survival.md's picture: writes docs/survival.json.
Root on Debian 12, as compare.py. Then `python docs/make_survival.py` draws it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import compare

#: What the job's output says, in order, and how the picture calls it.
SAID = {
    r"is silent since step": "node3 is silent: the other ranks are ended",
    r"is left out": "node3 does not answer, and is left out",
    r"given back to the scheduler": "node3 is given back to Slurm",
    r"start 2 of at most": "start 2, on the others",
}


def record() -> dict[str, Any]:
    with compare.cluster_of_four("recorded") as folder:
        (folder / "job.sh").write_text(compare.with_hpcddp("cut", folder))
        compare.on_cluster("sbatch", "--output=out", "job.sh", cwd=folder)
        said: list[tuple[float, str]] = []
        while not compare.is_over(folder):
            lines = compare.text_of(folder / "out").splitlines()
            said += [(time.time(), line) for line in lines[len(said) :]]
            time.sleep(0.02)
        return read(folder, said)


def read(folder: Path, said: list[tuple[float, str]]) -> dict[str, Any]:
    """Seconds since the first step: steps of each attempt, the fault, and what the job has said."""
    attempts = []
    for attempt in sorted((folder / "runs/t/attempts").iterdir()):
        lines = map(json.loads, (attempt / "metrics.jsonl").read_text().splitlines())
        attempts.append([(line["step"], line["time"]) for line in lines if "loss" in line])
    zero = attempts[0][0][1]
    told = []
    for pattern, what in SAID.items():
        when = next(when for when, line in said if re.search(pattern, line))
        told.append([round(when - zero, 2), what])
    fault = (folder / f"struck-{compare.AT}").stat().st_mtime - zero
    steps = [[[step, round(when - zero, 2)] for step, when in made] for made in attempts]
    return {"attempts": steps, "struck": compare.AT + 1, "fault": round(fault, 2), "said": told}


if __name__ == "__main__":
    (compare.REPO / "docs/survival.json").write_text(json.dumps(record()) + "\n")
