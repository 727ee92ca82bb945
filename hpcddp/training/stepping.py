"""From a batch to an optimizer's step: what a training loop calls in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, stack
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcddp.errors import RequestError
from hpcddp.training.arguments import check_kind, check_norm, check_optimizers
from hpcddp.training.data.loader import Step
from hpcddp.training.gate.step_gate import step_all
from hpcddp.training.parallel.staged import LOOP
from hpcddp.training.pipelined_step import PipelinedSteps
from hpcddp.training.saving import Saving


class Stepping(Saving):
    """The part of a `Runtime` that trains."""

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the global batch's gradients are complete: what needs them, such as clipping, goes here.

        True in each batch of the loader if a rank's share of the global batch fits through one forward pass.
        """
        micro, self._loop.gate.asked_last = self._loop.micro, True
        if micro.last and self._loop.has_backward:  # not so where the loop asks before its backward pass
            self._loop.collect()
        return micro.last

    @property
    def micro_batch_samples(self) -> int:
        """Samples of this micro batch that count: 0 in one that only keeps the ranks in step."""
        return self._loop.micro.samples

    def backward(self, loss: Tensor, *, summed: bool = False, scaler: GradScaler | None = None) -> None:
        """In place of `loss.backward()`: weighted so that all gradients sum to that of the mean over the global batch.

        The loss is the mean over what counts in the micro batch: samples, or the result of the loader's `count`. With
        `summed` it is the sum over those. A `scaler` scales the backward pass, not the loss that is recorded.
        """
        if self._gradients.staged is not None:
            raise RequestError(
                "rt.backward(loss) came on ranks that have a stage of the model each: the micro batches of a step go"
                " through the stages together",
                LOOP,
            )
        self._loop.backward(loss, summed=summed, scaler=scaler)

    def step(
        self,
        *optimizers: Optimizer,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
    ) -> bool:
        """All that follows the backward pass, in one call: clip to this norm, step, step the scheduler, clear the
        gradients; with a `scaler` also unscale and update.

        Acts at the last micro batch of the global batch. Returns whether it did.
        """
        check_optimizers(optimizers)
        check_norm(clip_norm, "rt.step(optimizer, clip_norm={})")
        self._loop.gate.scaled.check_prepared(scaler)
        if not self.is_last_micro_batch:
            self._loop.gate.note_early(optimizers, scheduler)
            return False
        step_all(optimizers, scheduler, clip_norm, scaler)
        return True

    def skip_step(self, *optimizers: Optimizer) -> bool:
        """In place of `optimizer.step()`, leave this step out, as where the norm of the gradients is not finite. None:
        all optimizers of the run.

        The global batch counts as one whose step a gradient scaler leaves out, and its gradients are cleared. Acts at
        the last micro batch of the global batch; returns whether it did. Call it on every rank at the same step.
        """
        return self._loop.skip(optimizers)

    def train_step(
        self,
        step: Step,
        loss_of: Callable[[Any], Tensor],
        *,
        summed: bool = False,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """One pass over a `step` of `loader.steps()`: `rt.backward(loss_of(batch))` for each micro batch.

        Returns this rank's losses, detached, one per micro batch: (micro batches,). The optimizer's step follows it,
        with the same `scaler` if one was given. In a pipeline the micro batches go through the stages together, and the
        losses are those of the micro batches that count, on every stage.
        """
        check_kind(step, Step, "rt.train_step({}, loss_of)", "step of loader.steps()", "step")
        staged = self._gradients.staged
        if staged is not None:
            steps = PipelinedSteps(staged, self._loop, self.seed, self.layout.data_rank)
            losses_there = steps.run(step, loss_of, summed=summed, scaler=scaler)
            self._gradients.backward_ends(self._loop.micro)
            return losses_there
        losses = []
        for batch in step:
            loss = loss_of(batch)
            self.backward(loss, summed=summed, scaler=scaler)
            losses.append(loss.detach())
        return stack(losses)
