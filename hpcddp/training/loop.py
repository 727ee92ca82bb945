"""Position of a training loop: its batch, the micro batch, the step. The work and the checks around each are here.

One batch of the training loader is one optimizer step. A run with `max_micro_batch` or in exact mode goes over each
batch in micro batches (`rt.micro_batches`); in any other a batch is one micro batch. Torch's optimizers are left as
they are: torch's own hooks for all optimizers say when one steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcddp.errors import RequestError
from hpcddp.training import mistakes
from hpcddp.training.data.loader import Batch, SecondLoader, Taken, are_in_proportion, is_of_batch
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import WeighedBatch, run_backward
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.progress import KnownParameters, OptimizerGradients
from hpcddp.training.options import RunSetup
from hpcddp.training.saves import Saves
from hpcddp.training.torch_compat import has_scheduler


class At(Enum):
    """Positions of the loop over the batches, by what a run may do next."""

    OUTSIDE = "at no batch"
    WHOLE = "at a batch that is one micro batch"
    TAKEN = "at a batch of several micro batches, outside of the loop over them"
    MICRO = "at one of several micro batches"
    PARTIAL = "at such a batch; the loop over its micro batches was left between two backward passes"


# The mistake of a call, by the position at which it is one.
_BACKWARD = {
    At.OUTSIDE: mistakes.BACKWARD_OUTSIDE,
    At.TAKEN: mistakes.MICRO_LOOP_MISSING,
    At.PARTIAL: mistakes.MICRO_LOOP_MISSING,
}
_MICRO_LOOP = {
    At.OUTSIDE: mistakes.OTHER_BATCH,
    At.MICRO: mistakes.OTHER_BATCH,
    At.PARTIAL: mistakes.MICRO_BATCH_LEFT_OUT,
}
_STEP = {At.MICRO: mistakes.STEP_EARLY, At.PARTIAL: mistakes.STEP_EARLY}
_NEXT_BATCH = {At.PARTIAL: mistakes.MICRO_BATCH_LEFT_OUT}


class TrainingLoop:
    """Follows which batch the training loader gives, the loop's backward passes, and the steps of optimizers."""

    def __init__(self, setup: RunSetup, gradients: Gradients, saves: Saves) -> None:
        self.optimizers: list[OptimizerGradients] = []
        self.schedulers: list[LRScheduler] = []
        self.stepped = False  # whether an optimizer has stepped in this batch
        self.has_looped = False  # whether a loop over the training loader has begun in this attempt
        self.is_left = False  # whether the loop over the batches was left, and no backward pass came since
        self._layout, self._device, self._seed = setup.layout, setup.group.device, setup.options.seed
        self._data_rank, self._trial = setup.layout.data_rank, setup.trial
        self._gradients = gradients
        self._saves, self._record, self._pace = saves, saves.record, saves.pace
        self._models, self._calls = saves.models, saves.models.calls
        self._data, self._seconds = saves.data, saves.data.seconds
        self._known: KnownParameters | None = None
        self._by_id: dict[int, OptimizerGradients] = {}
        self._at = At.OUTSIDE
        self._batch: Batch | None = None
        self._part: WeighedBatch | None = None  # the micro batch that the loop is at
        self._open: ExitStack | None = None  # what is done around it
        self._nth_pass = self._nth_batch = 0
        self._backwards = self._backwards_of_pass = self._backwards_of_part = 0  # of this batch
        self._nested = 0  # optimizers that are stepping, one in the other
        self._in_backward = False
        self._batches = 0  # of this attempt that are over
        self._outside: int | None = None  # the epoch of a loop over the loader outside of rt.epochs

    # ---- optimizers and schedulers

    def follow(self, one: object) -> None:
        """Follow this optimizer or scheduler. Other objects are left alone."""
        if isinstance(one, LRScheduler):
            self.schedulers.append(one)
        elif isinstance(one, Optimizer) and id(one) not in self._by_id:
            assert self._known is not None
            self._by_id[id(one)] = OptimizerGradients(one, self._known)
            self.optimizers.append(self._by_id[id(one)])

    @contextmanager
    def step_hooks(self, known: KnownParameters) -> Iterator[None]:
        """Install torch's hooks on optimizer steps, for the body. `known`: the parameters of the prepared models."""
        self._known = known
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._step_starts).remove)
            stack.callback(register_optimizer_step_post_hook(self._step_ends).remove)
            yield

    # ---- called by the loader

    @property
    def run_is_over(self) -> bool:
        """Whether there are no batches for this loop, since the run was finished before."""
        return self._saves.is_finished

    @property
    def steps_made(self) -> int:
        """The run's steps, with that of the batch that the loop is at, once an optimizer has stepped."""
        return self._saves.steps + (self.inside and self.stepped)

    def loop_starts(self, epoch: int) -> None:
        """The loop over an epoch's batches starts, at the first batch or where a resumed run continues."""
        opened = self._saves.open_epoch
        # a resumed run would not find again what is refused here
        if opened is not None and epoch > opened:
            raise mistakes.LOOP_TWICE.error(epoch=opened + 1)
        if opened is None and self._outside not in (None, epoch):
            raise mistakes.EPOCH_OUTSIDE.error()
        if opened is None:
            self._outside = epoch
        self.has_looped = True
        for second in self._seconds:
            second.forget()
        self._saves.loop_starts()
        self._pace.step_began()
        self.reseed()

    def count_batch(self) -> None:
        """A loop over some loader gets a batch now."""
        self._pace.batches += 1

    def batch_starts(self, batch: Batch) -> None:
        """The loop gets this batch now. StopTraining where it is the epoch's last, and the run stops before that."""
        self._saves.comes_to_step(batch.parts[0].micro)
        self._pace.batches += 1
        self._batch, self._at = batch, At.TAKEN if batch.is_several else At.WHOLE
        self._nth_batch += 1
        self._backwards = self._nth_pass = 0
        self.stepped = self.is_left = False
        if not batch.is_several:
            self._start_pass()
            self._start_part(batch.parts[0])

    def batch_left(self, batch: Batch) -> None:
        """The loop was left in this batch; or `next(iter(loader))` has taken it, and it is still to be used."""
        if batch is self._batch:
            self.is_left = True
            self._pace.loop_left()

    def step_ends(self) -> bool:
        """The loop is done with the batch: it counts as one step. Returns whether the loop ends after it."""
        batch = self._batch
        if batch is None:
            raise RequestError("two loops over the training loader ran in turn", "one loop over it at a time")
        if (row := _NEXT_BATCH.get(self._at)) is not None:
            raise self._error(row)
        if not self._backwards:
            stepped = ", and an optimizer has stepped" if self.stepped else ""
            raise mistakes.BATCH_WITHOUT_BACKWARD.error(stepped=stepped)
        self._end_part()
        self._batch, self._at, self._nested = None, At.OUTSIDE, 0
        for second in self._seconds:
            second.step_ends()
        self._batches += 1
        if self._batches == 1:
            self._check_schedulers()
        self._saves.count_step(batch.parts[-1].micro)
        if self._trial is not None:
            self._trial.step_ends()
        return self._saves.is_ending

    def reseed(self) -> None:
        """Seed the global generators by the run's seed and the number of steps, until the next batch starts."""
        seed_generators("between", self._seed, self._saves.steps)

    def end_left_batch(self) -> None:
        """The loop was left, perhaps in the middle: end what is still open. A batch that was only looked at is none."""
        if self.inside and (self._backwards or self.stepped):
            self.step_ends()
            self.reseed()
        elif self.inside:
            self.abandon()

    def abandon(self) -> None:
        """The `with` body has ended, perhaps by an exception in the middle of a batch."""
        self._end_part(collects=False)
        self._batch, self._at, self._in_backward, self._nested = None, At.OUTSIDE, False, 0

    def _error(self, row: mistakes.Mistake, **values: object) -> RequestError:
        parts = len(self._batch.parts) if self._batch is not None else 0
        when = " (it was over)" if self._batches else ""
        return row.error(done="some", all=parts, when=when, **values)

    def _check_schedulers(self) -> None:
        for one in self.optimizers:
            if has_scheduler(one.optimizer) and all(s.optimizer is not one.optimizer for s in self.schedulers):
                raise mistakes.SCHEDULER_NOT_PREPARED.error(kind=one.kind)

    # ---- position

    @property
    def inside(self) -> bool:
        """Whether the loop has taken a batch and its step has not ended."""
        return self._batch is not None

    @property
    def batch(self) -> Batch:
        """The batch that the loop is at. RequestError outside the loop over the loader."""
        if self._batch is None:
            raise self._error(mistakes.BACKWARD_OUTSIDE)
        return self._batch

    @property
    def samples(self) -> int:
        """Samples of this rank's batch, or micro batch, that count: 0 where it has a placeholder only."""
        parts = self.batch.parts if self._part is None else [self._part]
        return sum(part.micro.samples for part in parts)

    # ---- micro batches

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """See `Runtime.micro_batches`."""
        if not isinstance(batch, Batch):
            yield batch  # of a run whose batches are one micro batch each
            return
        if batch is not self._batch and not any(batch is one.batch for one in self._taken):
            raise mistakes.OTHER_BATCH.error()
        if (row := _MICRO_LOOP.get(self._at)) is not None:
            raise self._error(row)
        self._start_pass()
        self._begin_gradients()
        try:
            for part, content in batch.contents():
                self._at = At.MICRO
                self._start_part(part)
                yield content
                self._check_backward(part.micro)
                self._end_part()
            self._at = At.TAKEN
        finally:
            if self._at is At.MICRO:
                self._end_part(collects=False)
                self._at = At.PARTIAL if self._backwards_of_pass else At.TAKEN
        self._gradients.pass_ends()
        if self._backwards_of_pass:
            self._end_gradients()

    def _start_pass(self) -> None:
        self._backwards_of_pass = 0
        self._nth_pass += 1

    def _start_part(self, part: WeighedBatch) -> None:
        micro = part.micro
        if micro.nth:
            self.count_batch()
        self._part, self._backwards_of_part = part, 0
        if self._calls.are_watched:
            self._calls.start()
        place: tuple[int | str, ...] = (self._data_rank, micro.nth) if micro.slice is None else ("slice", micro.slice)
        again = (self._nth_pass - 1,) if self._nth_pass > 1 else ()
        if self._trial is not None:
            place = self._trial.key(place, micro)
        seed_generators("step", self._seed, self._saves.steps, *place, *again)
        is_whole = micro.last and not micro.nth and micro.samples > 0
        if not (is_whole and self._gradients.takes_parts_only):
            self._open = ExitStack()
            self._open.enter_context(self._gradients.micro(micro))
        if self._trial is not None:
            self._trial.part_starts(micro)

    def _check_backward(self, micro: MicroBatch) -> None:
        """A micro batch is over: all of a pass have a backward pass, or none."""
        had_before = self._backwards_of_pass > self._backwards_of_part
        if micro.nth and (self._backwards_of_part > 0) != had_before:
            raise mistakes.MICRO_BATCH_LEFT_OUT.error(done=micro.nth if had_before else 1, all=micro.nth + 1)

    def _end_part(self, *, collects: bool = True) -> None:
        part, self._part = self._part, None
        opened, self._open = self._open, None
        if part is not None and opened is not None:
            with opened:
                if collects:
                    self._gradients.collect(part.micro)

    # ---- backward passes

    @property
    def _taken(self) -> list[Taken]:
        """The batches that loops over second loaders have taken for this step."""
        return [one for second in self._seconds for one in second.taken]

    def _find_part(self, of: Any) -> WeighedBatch:
        """The micro batch that a loss comes from, by its batch or a tensor of that. None: all that the loop has now."""
        part = self._part
        if part is None:
            raise self._error(_BACKWARD.get(self._at, mistakes.BACKWARD_OUTSIDE))
        if self._at is At.MICRO:
            return part  # the loop over its micro batches says it
        if of is not None:
            return self._find_batch(of).parts[0]
        for second in self._seconds:
            for one in second.taken:
                self._check_shares(part, second, one.batch.parts[0])
        return part

    def _find_batch(self, of: Any) -> Batch:
        """The same for a batch, and behind a loop over its micro batches. None: the only one."""
        if of is None and not self._seconds:
            return self.batch
        for one in (*(taken.batch for taken in reversed(self._taken)), self.batch):
            if one is of or (not one.is_several and is_of_batch(one.content, of)):
                return one
        raise mistakes.OF_UNKNOWN.error()

    def _check_shares(self, part: WeighedBatch, second: SecondLoader, other: WeighedBatch) -> None:
        ranks, first, more = self._layout.data_size, part.micro, other.micro
        if ranks == 1:
            return
        counts = self._data.loader.weighing.count is not None or second.weighing.count is not None
        if counts or not are_in_proportion(first, more, ranks):
            raise mistakes.SHARES_DIFFER.error(first=first.total, second=more.total, number=second.number, ranks=ranks)

    def backward(self, loss: Tensor, *, summed: bool, scaler: GradScaler | None, of: Any = None) -> None:
        """See `Runtime.backward`."""
        part = self._find_part(of)
        for second in self._seconds:
            second.use()
        is_whole = self._at is At.WHOLE
        if is_whole:
            self._begin_gradients()
        self._in_backward, self.is_left = True, False
        try:
            with self._calls.checked() if self._calls.are_watched else nullcontext():
                factor = run_backward(loss, part, self._models.whole, summed=summed, scaler=scaler)
        finally:
            self._in_backward = False
        self._backwards += 1
        self._backwards_of_pass += 1
        self._backwards_of_part += 1
        if is_whole:
            self._end_gradients()
        if factor is not None:
            self._record.add_loss(loss.detach(), factor, part.micro.slice or 0)
        if self._trial is not None:
            self._trial.backward(loss.detach(), factor, self._gradients.averaged_over)

    def _begin_gradients(self) -> None:
        for one in self.optimizers:
            one.begin_pass(self._nth_batch, alone=len(self.optimizers) == 1)

    def _end_gradients(self) -> None:
        for one in self.optimizers:
            one.end_pass(self._nth_batch)

    def mean(self, values: Tensor | float | Sequence[Any], of: Any = None) -> float:
        """See `Runtime.mean`."""
        parts = [self._find_part(of)] if self._part is not None else self._find_batch(of).parts
        numbers = torch.as_tensor(values).detach().double().reshape(-1).tolist()
        if len(numbers) == 1:
            numbers *= len(parts)
        if len(numbers) != len(parts):
            raise RequestError(
                f"rt.mean was given {len(numbers)} numbers for {len(parts)} micro batches", "rt.mean(loss)"
            )
        sums = [0.0] * self._gradients.slots
        for part, number in zip(parts, numbers, strict=True):
            if part.counted:
                weight = float(part.mean) / self._gradients.averaged_over
                sums[part.micro.slice or 0] += weight * number
        total = torch.tensor(sums, dtype=torch.float64, device=self._device)
        if self._layout.data_size > 1:
            dist.all_reduce(total, group=self._layout.data_group)
        return math.fsum(total.tolist()) if bool(total.isfinite().all()) else float(total.sum())

    # ---- optimizers' steps

    def _step_starts(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch calls it before each step of each optimizer; of one that calls another's, or `super().step()`, for
        both. A gradient scaler that leaves a step out makes none."""
        if not self._nested:
            self._check_step(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
        self._nested += 1

    def _check_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        one, batch = self._by_id.get(id(optimizer)), self._batch
        if batch is None:
            if one is not None:
                one.check_step_behind()
            return
        if one is None and not self._has_known(optimizer):
            return
        kind = type(optimizer).__name__
        if self._in_backward:
            raise mistakes.STEP_IN_BACKWARD.error(kind=kind)
        if one is None:
            raise mistakes.STEP_NOT_PREPARED.error(kind=kind)
        if (row := _STEP.get(self._at)) is not None:
            raise self._error(row, kind=kind)
        if self._known is not None and self._known.frozen:
            self._known.check_frozen()
        if self._backwards:
            if self._calls.are_watched:
                self._calls.check_averaged()
            if self._gradients.forward_is_collective:
                self._gradients.check_step()
        if not has_closure:  # else they come inside of the step
            one.check_step(had_backward=self._backwards > 0)

    def _has_known(self, optimizer: Optimizer) -> bool:
        parameters = (id(p) for group in optimizer.param_groups for p in group["params"])
        return self._known is not None and not self._known.all.isdisjoint(parameters)

    def _step_ends(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._nested = max(self._nested - 1, 0)
        one = self._by_id.get(id(optimizer))
        if one is not None:
            one.end_step()
            self.stepped = True
