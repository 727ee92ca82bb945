"""A run folder as two jobs of a chain of three leave it, for tests that read one."""

from __future__ import annotations

import os
from pathlib import Path

from hpcddp.batchplan import plan_batch
from hpcddp.runs.chain import write_follow_up
from hpcddp.runs.folder import MANIFEST, RunFolder, name_checkpoint
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import Holder, release_run, take_run
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.state import open_attempt, record_checkpoint, write_state

COMMAND = ("python", "train.py")


def write_chain_run(path: Path) -> RunFolder:
    """Jobs 41.pbs1 and 42.pbs1 have made two steps each, with a checkpoint; the second has queued 43.pbs1."""
    run = RunFolder(str(path))
    write_object(run.plan, {"name": "train", "command": list(COMMAND), "global_batch": 8})
    for turn in (1, 2):
        job, first = f"{40 + turn}.pbs1", 2 * turn - 1
        attempt = run.attempt(f"{job}.1")
        take_run(run, Holder(attempt.name, "n1", "", 1, "", "pbs", job, COMMAND), lambda _scheduler, _job: "gone")
        open_attempt(attempt)
        write_object(attempt.chain, {"attempt": attempt.name, "turn": turn, "of": 3, "step": first - 1})
        write_object(attempt.versions, {"plan": plan_batch(8, 1)._asdict(), "ranks": [{"host": "n1"}]})
        write_object(run.settings, {"settings": {"run": {"samples": 24}}})
        with MetricsFile(attempt.metrics) as metrics:
            for step in (first, first + 1):
                metrics.write("step", step=step, epoch=step // 4, loss=1 / step, lr=0.01, samples_per_s=100.0)
        checkpoint = name_checkpoint(run.checkpoints, first + 1)
        write_object(os.path.join(checkpoint, MANIFEST), {"epoch": (first + 1) // 4})
        record_checkpoint(attempt, step=first + 1, epoch=(first + 1) // 4)
        write_state(attempt, "unfinished", step=first + 1, epoch=(first + 1) // 4, reason="the deadline")
        os.makedirs(os.path.dirname(attempt.log))
        Path(attempt.log).write_text("hpcddp: stops at the deadline\n")
        write_follow_up(attempt, f"{job[:1]}{turn + 1}.pbs1")
        release_run(run, attempt.name, 85)
    return run
