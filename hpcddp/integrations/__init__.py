"""Frameworks' own training loops in a run of hpcddp: they stop in time, save, and resume in the next attempt.

    hpcddp.integrations.attach(trainer)        # a Trainer of transformers or of Lightning

    with hpcddp.integrations.loop() as run:    # a loop with Accelerate, Fabric, DeepSpeed or plain torch
        …

An edge: the process's environment is read here and passed on. No framework is imported before it is used.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.folder import find_attempt
from hpcddp.training.arguments import read_save_every
from hpcddp.uncaught import Opening, two_lines

if TYPE_CHECKING:
    from hpcddp.integrations.plain_loop import Loop

__all__ = ["attach", "loop"]

# The package of a class among a trainer's bases, and the module that attaches such a trainer.
_TRAINERS = {
    ("transformers", "Trainer"): "hf_trainer",
    ("lightning", "Trainer"): "lightning_trainer",
    ("pytorch_lightning", "Trainer"): "lightning_trainer",
}


def attach(trainer: Any, *, save_every: int | str | None = None) -> None:
    """Let a Trainer of transformers or Lightning take part in the run: call it before `train()` or `fit()`.

    It then resumes from the run's newest complete checkpoint, stops on all ranks after the same step before the
    walltime ends or when a signal comes, saves there, writes the run's state, and ends the script with status 0.
    `save_every` is a time such as "30m". For Lightning it may be a number of steps, and None saves at the end of each
    epoch and every ten minutes; transformers' Trainer saves as its arguments say, too. Outside of a job script, and of
    `hpcddp launch`, nothing changes, and a line says so. LaunchError if the trainer has fewer ranks than the launcher
    started; RequestError if a resume would be wrong, or for another object.
    """
    with two_lines():
        kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(trainer).__mro__]
        module = next((_TRAINERS[kind] for kind in kinds if kind in _TRAINERS), None)
        if module is None:
            raise RequestError(
                f"attach(…) takes a Trainer of transformers or Lightning, not a {type(trainer).__name__}",
                "in a loop of your own: with hpcddp.integrations.loop() as run: …",
            )
        attempt = find_attempt(os.environ)
        if attempt is not None:
            every = read_save_every(save_every, "hpcddp.integrations.attach(trainer, save_every={})")
            importlib.import_module(f"{__name__}.{module}").attach(trainer, attempt, os.environ, every)
        elif os.environ.get("RANK", "0") == "0":
            what = "no run folder (HPCDDP_RUN_DIR, HPCDDP_ATTEMPT): nothing stops or resumes this training"
            print(f"hpcddp: {what}\nhint: hpcddp launch -- python train.py", file=sys.stderr, flush=True)


def loop(
    *, global_batch: int | None = None, save_every: int | str | None = None, keep_checkpoints: int = 2
) -> AbstractContextManager[Loop]:
    """A training loop of your own in a `with` body; open it after the process group.

        with hpcddp.integrations.loop() as run:
            if run.resume:
                …                                   # load from the folder run.resume
            for step in range(run.step, 1000):
                …                                   # one optimizer step
                run.after_step(step + 1, save)      # every rank saves by save(folder), when it is time

    `global_batch`: samples per optimizer step over all ranks, if the loop finds its place in the data on another number
    of ranks as long as that stays the same. None: a resume on another number of ranks is refused. `save_every`: a
    number of steps, or a time such as "30m"; None: every ten minutes. `keep_checkpoints`: how many stay. LaunchError
    outside of a job script and of `hpcddp launch`, and without a process group.
    """
    with two_lines():
        try:
            from hpcddp.integrations.plain_loop import open_loop
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise LaunchError("hpcddp.integrations.loop needs torch", "python -m pip install torch") from error
    opened = open_loop(os.environ, global_batch=global_batch, save_every=save_every, keep=keep_checkpoints)
    return Opening(opened, "hpcddp.integrations.loop(…)", "run")
