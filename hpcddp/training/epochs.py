"""The loops over `rt.epochs` and `rt.batches`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hpcddp.training import mistakes
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.options import RunSetup
from hpcddp.training.saves import Saves
from hpcddp.training.stopping import STEPS_UNTIL_AGREED, StopTraining


class Epochs:
    """The loops over `rt.epochs` and `rt.batches`: what is left of a run, and what happens between its epochs. A loop
    that the script leaves has finished early: by `break`, by `return`, or by an exception that it catches behind it.
    Python tells these three apart for nobody."""

    def __init__(self, setup: RunSetup, loop: TrainingLoop, saves: Saves) -> None:
        self._seed = setup.options.seed
        self._loop, self._saves, self._report, self._data = loop, saves, saves.report, saves.data
        self._open: str | None = None  # the loop that is open, or was left, in words

    def epochs(self, count: int) -> Iterator[int]:
        """See `Runtime.epochs`."""
        saves, loop, sampler = self._saves, self._loop, self._data.loader.sampler
        self._begin("epochs", count)
        while (epoch := sampler.epoch) < count and not saves.is_ending:
            saves.open_epoch, self._open = epoch, f"the loop left epoch {epoch + 1} of {count}"
            batch = sampler.plan.global_batch
            self._report.expect(saves.steps, count - epoch, sampler.length, sampler.position, batch)
            seed_generators("epoch", self._seed, epoch)
            try:
                yield epoch
            except GeneratorExit:
                saves.has_left_epochs = True
                raise
            is_last = epoch + 1 == count
            if not loop.has_looped and (loop.stepped or is_last):
                raise mistakes.LOADER_UNUSED.error()
            self.end_steps()
            saves.agree_to_go_on(f"ended epoch {epoch + 1} of {count}", 0 if is_last else STEPS_UNTIL_AGREED)
            self._close()
            saves.pace.tail_ended(early=sampler.epoch == epoch)
            sampler.end_epoch(epoch)
            for second in self._data.seconds:
                second.epoch_ends()
            if saves.is_due_at_end:
                saves.save_now()
        saves.leave_if_stopping()

    def batches(self, count: int) -> Iterator[Any]:
        """See `Runtime.batches`."""
        saves, loop, loader = self._saves, self._loop, self._data.loader
        self._begin("batches", count)
        self._report.expect_steps(count)
        saves.last_step = count
        while saves.steps < count and not saves.is_ending:
            saves.open_epoch, self._open = loader.sampler.epoch, f"the loop left rt.batches({count})"
            for batch in loader:
                try:
                    yield batch
                except GeneratorExit:
                    saves.has_left_epochs = True
                    raise
                if saves.steps + 1 == count:
                    break
            if loop.inside:
                saves.in_tail_of_last(loop.step_ends)
                loop.reseed()
        saves.last_step = None
        self._close()
        if not saves.is_finished and saves.is_due_at_end:
            saves.agree_to_go_on(f"ended rt.batches({count})", 0)
            saves.save_now()
        saves.leave_if_stopping()

    def _begin(self, unit: str, count: int) -> None:
        """`rt.epochs(count)` or `rt.batches(count)`, the `unit`, begins."""
        saves = self._saves
        self._loop.end_left_batch()  # of a loop before, which was left in a step
        saves.open_again("steps" if unit == "batches" else unit, count)
        saves.checkpointer.begin_training(is_finished=saves.is_finished)
        saves.agree(f"began the loop over rt.{unit}()")

    def _close(self) -> None:
        self._open, self._saves.open_epoch, self._saves.in_tail = None, None, False

    def end_steps(self) -> None:
        """Count the last step, in the tail of an epoch, if the loop left its batches by `break`."""
        self._saves.in_tail_of_last(self._loop.end_left_batch)

    def finish(self) -> str | None:
        """The `with` body has ended without an error: the last numbers, the last checkpoint. Returns the reason to stop
        here; None: the run is finished."""
        saves, loop, data = self._saves, self._loop, self._data
        with suppress(StopTraining):
            loop.end_left_batch()
        saves.agree("ended the `with` body")
        saves.record.catch_up()
        for loader in data.loaders:
            loader.close()
        saves.models.same.check(saves.steps, at_end=True)
        saves.save_now()
        saves.finish_reason = saves.finish_reason or self._open
        # of the one epoch that a loop outside of rt.epochs makes, all is done
        return None if saves.in_tail and saves.open_epoch is None else saves.stop_reason
