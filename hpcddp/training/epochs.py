"""The loops over `rt.epochs` and `rt.batches`: what is left of a run, and what happens between its epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from hpcddp.batchplan import BatchPlan
from hpcddp.training import mistakes
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.options import RunSetup
from hpcddp.training.report import print_warning
from hpcddp.training.saves import Saves
from hpcddp.training.stopping import STEPS_UNTIL_AGREED, StopTraining


class Epochs:
    """The loops over `rt.epochs` and `rt.batches`: what is left of a run, and what happens between its epochs. A loop
    that the script leaves has finished early: by `break`, by `return`, or by an exception that it catches behind it.
    Python tells these three apart for nobody."""

    def __init__(self, setup: RunSetup, loop: TrainingLoop, saves: Saves) -> None:
        self._seed, self._is_first = setup.options.seed, setup.group.is_first
        self._loop, self._saves, self._report, self._data = loop, saves, saves.report, saves.data
        self._most: dict[str, int] = {}  # epochs and steps that rt.epochs and rt.batches were asked for
        self._open: str | None = None  # the loop that is open, or was left, in words

    def epochs(self, count: int) -> Iterator[int]:
        """See `Runtime.epochs`."""
        saves, loop, sampler = self._saves, self._loop, self._data.loader.sampler
        self._begin("epochs", count, sampler.epoch)
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
            loop.check_caught()
            if not loop.has_looped and (loop.has_stepped or is_last):
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
        self._begin("batches", count, saves.steps)
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
            loop.check_caught()
            if loop.inside:
                saves.in_tail_of_last(loop.step_ends)
                loop.reseed()
        saves.last_step = None
        self._close()
        if not saves.is_finished and saves.is_due_at_end:
            saves.agree_to_go_on(f"ended rt.batches({count})", 0)
            saves.save_now()
        saves.leave_if_stopping()

    def _begin(self, unit: str, count: int, over: int) -> None:
        """`rt.epochs(count)` or `rt.batches(count)`, the `unit`, begins after so many epochs or steps."""
        saves, most = self._saves, self._most.get(unit)
        self._loop.settle()  # of a loop before, which was left in a step
        saves.open_again("steps" if unit == "batches" else unit, count)
        if most is not None and count <= min(over, most) and not saves.is_ending:
            raise mistakes.NONE_LEFT.error(unit=unit, count=count, most=most, over=over, more=most + count)
        self._most[unit] = max(count, most or 0)
        plan, length = self._data.plan, self._data.loader.sampler.length
        assert plan is not None
        print_warning(find_empty_ranks(saves.models.whole, plan, length), is_first=self._is_first)
        saves.checkpointer.check_untouched(is_finished=saves.is_finished)
        saves.agree(f"began the loop over rt.{unit}()")

    def _close(self) -> None:
        self._open, self._saves.open_epoch, self._saves.in_tail = None, None, False

    def end_steps(self) -> None:
        """Count the last step, in the tail of an epoch, if the loop left its batches by `break`."""
        self._saves.in_tail_of_last(self._loop.settle)

    def finish(self) -> str | None:
        """The `with` body has ended without an error: the last numbers, the last checkpoint. Returns the reason to stop
        here; None: the run is finished."""
        saves, loop, data = self._saves, self._loop, self._data
        loop.check_caught()
        with suppress(StopTraining):
            loop.settle()
        loop.check_trained()
        saves.agree("ended the `with` body")
        saves.record.catch_up()
        for loader in data.loaders:
            loader.close()
        saves.check_state(at_end=True)
        saves.save_now()
        saves.finish_reason = saves.finish_reason or self._open
        # of the one epoch that a loop outside of rt.epochs makes, all is done
        return None if saves.in_tail and saves.open_epoch is None else saves.stop_reason


def find_empty_ranks(models: Sequence[nn.Module], plan: BatchPlan, length: int | None) -> str | None:
    """A warning if SyncBatchNorm may meet a placeholder sample, which a rank without samples computes with.

    BatchNorm ignores that sample; SyncBatchNorm exchanges its statistics with the other ranks in the forward pass, so
    that the sample enters them. `length` of an epoch; None: it is not known.
    """
    if not any(isinstance(layer, nn.SyncBatchNorm) for model in models for layer in model.modules()):
        return None
    last = length % plan.global_batch if length is not None else 1
    idle = plan.data_size - 1  # the last rank's share is the smallest
    if all(piece.samples for total in (plan.global_batch, last) if total for piece in plan.pieces(idle, total)):
        return None
    return (
        f"a rank has no sample in some micro batches of {plan}, and SyncBatchNorm includes the placeholder that it"
        " computes with in its statistics\nhint: another global batch, or DataLoader(data, drop_last=True)"
    )
