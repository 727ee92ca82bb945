"""A training loop of the user's own, with Accelerate, Fabric, DeepSpeed or plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from hpcddp.errors import LaunchError
from hpcddp.integrations.run import Run, opened
from hpcddp.runs.folder import find_attempt
from hpcddp.training.arguments import SaveEvery, read_optional, read_save_every, read_whole
from hpcddp.training.options import DEFAULT_SAVE_S
from hpcddp.training.stopping import StopTraining

FRAMEWORK = "a loop of its own"
_CALL = "hpcddp.integrations.loop"


class Loop:
    """What `hpcddp.integrations.loop()` gives. Call its methods on every rank alike."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.resume = Path(run.saved.path) if run.saved else None  # the folder of the newest complete checkpoint
        self.step = run.step  # of that checkpoint: the optimizer steps of the attempts before
        self.epoch = run.epoch  # as it was given to `after_step`
        self.is_main = run.ranks.is_first

    def after_step(self, step: int, save: Callable[[Path], object], epoch: int = 0) -> None:
        """Call it after each optimizer step, with their number since the start of the run.

        `save(folder)` is called on every rank when a checkpoint is due. If the run has to stop, before the walltime or
        by a signal to any rank, the `with` body is left after it, on all ranks at the same step.
        """
        stops = self._run.count_step(read_whole(step, "run.after_step({}, save)", least=0), epoch)
        if stops or self._run.is_save_due:
            with self._run.saving(step, epoch) as folder:
                save(folder)
        if stops:
            raise StopTraining


@contextmanager
def open_loop(
    env: MutableMapping[str, str], *, global_batch: int | None, save_every: int | str | None, keep: int
) -> Iterator[Loop]:
    """See `hpcddp.integrations.loop`, which calls this with the process's environment."""
    global_batch = read_optional(global_batch, f"{_CALL}(global_batch={{}})")
    every = read_save_every(save_every, f"{_CALL}(save_every={{}})")
    if every == SaveEvery():
        every = SaveEvery(seconds=DEFAULT_SAVE_S)
    keep = read_whole(keep, f"{_CALL}(keep_checkpoints={{}})")
    attempt = find_attempt(env)
    if attempt is None:
        raise LaunchError(
            f"{_CALL}() saves into a run folder, and there is none: HPCDDP_RUN_DIR and HPCDDP_ATTEMPT are not set",
            "hpcddp launch -- python train.py",
        )
    with opened(FRAMEWORK, attempt, env, f"{_CALL}()", global_batch=global_batch, keep=keep, save_every=every) as run:
        yield Loop(run)
