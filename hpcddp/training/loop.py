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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcddp.errors import HpcddpError, RequestError
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
    """Positions of the loop over the batches."""

    OUTSIDE = "at no batch"
    WHOLE = "at a batch that is one micro batch"
    TAKEN = "at a batch of several micro batches, outside of the loop over them"
    MICRO = "at one of several micro batches"
    PARTIAL = "at such a batch; the loop over its micro batches was left between two backward passes"


# what is refused where; all else is right
_BACKWARD = {
    At.OUTSIDE: mistakes.BACKWARD_OUTSIDE,
    At.TAKEN: mistakes.MICRO_LOOP_MISSING,
    At.PARTIAL: mistakes.MICRO_LOOP_MISSING,
}
_MICRO_LOOP = {
    At.OUTSIDE: mistakes.OTHER_BATCH,
    At.MICRO: mistakes.MICRO_LOOPS_MIXED,
    At.PARTIAL: mistakes.MICRO_BATCH_LEFT_OUT,
}
_STEP = {At.MICRO: mistakes.STEP_EARLY, At.PARTIAL: mistakes.STEP_EARLY}
_NEXT_BATCH = {At.PARTIAL: mistakes.MICRO_BATCH_LEFT_OUT}


class TrainingLoop:
    """Hears from the training loader which batch the loop has, from the loop its backward passes, and from torch the
    steps of optimizers."""

    def __init__(self, setup: RunSetup, gradients: Gradients, saves: Saves) -> None:
        self.optimizers: list[OptimizerGradients] = []
        self.schedulers: list[LRScheduler] = []
        self.stepped = False  # whether an optimizer has stepped in this batch
        self.has_stepped = False  # in this attempt
        self.has_looped = False  # whether a loop over the training loader has
        self.is_left = False  # whether the loop over the batches was left, and no backward pass came since
        self._layout, self._device, self._seed = setup.layout, setup.group.device, setup.options.seed
        self._data_rank, self._trial = setup.layout.data_rank, setup.trial
        self._gradients, self._in_place = gradients, gradients.adds_up_in_place
        self._saves, self._sums, self._pace = saves, saves.record.sums, saves.pace
        self._models, self._calls = saves.models, saves.models.calls
        self._data, self._seconds = saves.data, saves.data.seconds
        self._known: KnownParameters | None = None
        self._by_id: dict[int, OptimizerGradients] = {}
        self._foreign: set[int] = set()  # optimizers that step other models only, by id
        self._refused: HpcddpError | None = None  # the first error of this loop: while the run goes on, it was caught
        self._at = At.OUTSIDE
        self._batch: Batch | None = None
        self._part: WeighedBatch | None = None  # the micro batch that the loop is at
        self._open: ExitStack | None = None  # what is done around it
        self._nth_pass = self._nth_batch = 0
        self._backwards = self._backwards_of_pass = self._backwards_of_part = 0  # of this batch
        self._stepping: list[str] = []  # the kinds of the optimizers that step, one in the other
        self._in_backward = False
        self._had_backward = 0  # batches of this attempt
        self._outside: int | None = None  # the epoch of a loop over the loader outside of rt.epochs

    # ---- what a run is made of

    def take(self, thing: object) -> None:
        """Follow this optimizer, scheduler or gradient scaler. Others are left alone."""
        if isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
        elif isinstance(thing, GradScaler):
            self._models.scalers.append(thing)
        elif isinstance(thing, Optimizer) and id(thing) not in self._by_id:
            assert self._known is not None
            self._by_id[id(thing)] = OptimizerGradients(thing, self._known)
            self.optimizers.append(self._by_id[id(thing)])

    @contextmanager
    def hearing(self, known: KnownParameters) -> Iterator[None]:
        """Install torch's hooks on optimizer steps, for the body. `known`: the parameters of the prepared models."""
        self._known = known
        hooks = (
            register_optimizer_step_pre_hook(self._step_starts),
            register_optimizer_step_post_hook(self._step_ends),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---- what the loader says

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
        self.check_caught()
        self._check_loop(epoch, self._saves.open_epoch)
        self.has_looped = True
        for second in self._seconds:
            second.forget()
        self._saves.loop_starts()
        self._pace.step_began()
        self.reseed()

    def _check_loop(self, epoch: int, opened: int | None) -> None:
        """Refuse a loop over the batches of this epoch that a resumed run would not find again. `opened`: the epoch
        that rt.epochs or rt.batches is in, or was left in."""
        if opened is not None and epoch > opened:
            raise mistakes.LOOP_TWICE.error(epoch=opened + 1)
        if opened is None and self._outside not in (None, epoch):
            raise mistakes.EPOCH_OUTSIDE.error()
        if opened is None:
            self._outside = epoch

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
        try:
            self._end_batch()
        except HpcddpError as error:
            self._refuse(error)
        return self._saves.is_ending

    def _end_batch(self) -> None:
        batch = self._batch
        if batch is None:
            raise RequestError("two loops over the training loader ran in turn", "one loop over it at a time")
        if (row := _NEXT_BATCH.get(self._at)) is not None:
            raise self._error(row)
        if self._stepping:
            raise mistakes.STEP_LEFT.error(kind=self._stepping[0])
        if not self._backwards:
            stepped = ", and an optimizer has stepped" if self.stepped else ""
            raise mistakes.BATCH_WITHOUT_BACKWARD.error(stepped=stepped)
        self._end_part()
        self._batch, self._at = None, At.OUTSIDE
        for second in self._seconds:
            second.step_ends()
        self._had_backward += 1
        if self._had_backward == 1:
            self._check_schedulers()
        self._saves.count_step(batch.parts[-1].micro, stepped=self.stepped)
        if self._trial is not None:
            self._trial.step_ends()

    def reseed(self) -> None:
        """Seed the global generators by the run's seed and the number of steps, until the next batch starts."""
        seed_generators("between", self._seed, self._saves.steps)

    def settle(self) -> None:
        """The loop was left, perhaps in the middle: end what is still open. A batch that was only looked at is none."""
        if self.inside and (self._backwards or self.stepped or self._stepping):
            self.step_ends()
            self.reseed()
        elif self.inside:
            self.let_go()

    def let_go(self) -> None:
        """The `with` body has ended, perhaps by an exception in the middle of a batch."""
        self._end_part(collects=False)
        self._batch, self._at, self._in_backward = None, At.OUTSIDE, False
        self._stepping.clear()

    # ---- errors of the loop that the script has caught

    def check_caught(self) -> None:
        """RequestError if the loop was refused something before, and the script went on."""
        if self._refused is not None:
            raise RequestError(
                f"the script caught an error of this run and went on: {self._refused.message}", self._refused.hint
            ) from self._refused

    def _refuse(self, error: HpcddpError) -> NoReturn:
        self._refused = self._refused or error
        raise error

    def _error(self, row: mistakes.Mistake, **values: object) -> RequestError:
        """The error of this mistake, at this batch."""
        parts = len(self._batch.parts) if self._batch is not None else 0
        when = " (it was over)" if self._had_backward else ""
        return row.error(done="some", all=parts, when=when, **values)

    def check_trained(self) -> None:
        """Check, at the end of the body, that an optimizer has stepped if several batches had backward passes."""
        if self._had_backward > 1 and self.optimizers and not (self.has_stepped or self._models.may_skip_steps):
            raise mistakes.NEVER_STEPPED.error(batches=self._had_backward)

    def _check_schedulers(self) -> None:
        for one in self.optimizers:
            if has_scheduler(one.optimizer) and all(s.optimizer is not one.optimizer for s in self.schedulers):
                raise mistakes.SCHEDULER_NOT_PREPARED.error(kind=one.kind)

    # ---- where the loop is

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
        try:
            if batch is not self._batch and not any(batch is one.batch for one in self._taken):
                raise mistakes.OTHER_BATCH.error()
            if (row := _MICRO_LOOP.get(self._at)) is not None:
                raise self._error(row)
            self._start_pass()
            for part, content in batch.contents():
                self._at = At.MICRO
                self._start_part(part)
                yield content
                self._check_backward(part.micro)
                self._end_part()
            self._end_pass()
        except HpcddpError as error:
            self._refuse(error)
        finally:
            if self._at is At.MICRO:
                self._end_part(collects=False)
                self._at = At.PARTIAL if self._backwards_of_pass else At.TAKEN

    def _start_pass(self) -> None:
        self._backwards_of_pass = 0
        self._nth_pass += 1
        if not self._in_place:
            for one in self.optimizers:
                one.expect_batch(self._nth_batch)

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
        if not (is_whole and self._in_place):
            self._open = ExitStack()
            self._open.enter_context(self._gradients.micro(micro))
        if micro.nth == 0 and not self._in_place:
            for one in self.optimizers:
                one.mark()
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
        try:
            if part is not None and not self._in_place:
                for one in self.optimizers:
                    one.unmark()
                if collects and self._backwards_of_part and any(one.were_changed() for one in self.optimizers):
                    raise mistakes.GRADIENTS_CHANGED.error()
                if collects:
                    self._gradients.collect(part.micro)
        finally:
            if opened is not None:
                opened.close()

    def _end_pass(self) -> None:
        """Behind the last micro batch of a pass: the gradients are those of the batch."""
        self._at = At.TAKEN
        if not self._in_place:
            if self._backwards_of_pass:
                for one in self.optimizers:
                    one.note_backward(self._nth_batch)
            self._gradients.pass_ends()

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
        if self._data.loader.weighing.count is not None or second.weighing.count is not None:
            raise mistakes.COUNTS_OF_TWO.error()
        if not are_in_proportion(first, more, ranks):
            raise mistakes.SHARES_DIFFER.error(first=first.total, second=more.total, number=second.number, ranks=ranks)

    def backward(self, loss: Tensor, *, summed: bool, scaler: GradScaler | None, of: Any = None) -> None:
        """See `Runtime.backward`."""
        try:
            part = self._find_part(of)
            for second in self._seconds:
                second.use()
            self._check_scaler(scaler)
            self._expect_backward(part.micro)
            self._in_backward, self.is_left = True, False
            try:
                with self._calls.checked() if self._calls.are_watched else nullcontext():
                    factor = run_backward(
                        loss, part.micro, part.weight, self._models.whole, summed=summed, scaler=scaler
                    )
            finally:
                self._in_backward = False
            self._note_backward(part.micro)
        except HpcddpError as error:
            self._refuse(error)
        if factor is not None:
            self._sums.add_loss(loss.detach(), factor, part.micro.slice or 0)
        if self._trial is not None:
            self._trial.backward(loss.detach(), float(factor or 0.0) / self._gradients.averaged_over)

    def _check_scaler(self, scaler: GradScaler | None) -> None:
        if scaler is None:
            if self._models.scalers and self._models.may_skip_steps:
                raise mistakes.SCALER_MISSING.error()
        elif scaler.is_enabled() and scaler not in self._models.scalers:
            raise mistakes.SCALER_NOT_PREPARED.error()

    def _expect_backward(self, micro: MicroBatch) -> None:
        is_first, alone = micro.nth == 0, len(self.optimizers) == 1
        for one in self.optimizers:
            if self._in_place and is_first:
                one.expect_batch(self._nth_batch)
            elif one.unmark() or (self._in_place and self._backwards_of_pass and one.were_changed()):
                raise mistakes.GRADIENTS_CHANGED.error()
            if is_first and not (self._backwards_of_part and self._at is At.MICRO):
                one.expect_backward(alone=alone)

    def _note_backward(self, micro: MicroBatch) -> None:
        self._backwards += 1
        self._backwards_of_pass += 1
        self._backwards_of_part += 1
        for one in self.optimizers:
            if micro.last and self._in_place:
                one.note_backward(self._nth_batch)
            else:
                one.look()

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
            if part.weight.counted:
                weight = float(part.weight.mean) / self._gradients.averaged_over
                sums[part.micro.slice or 0] += weight * number
        total = torch.tensor(sums, dtype=torch.float64, device=self._device)
        if self._layout.data_size > 1:
            dist.all_reduce(total, group=self._layout.data_group)
        return math.fsum(total.tolist()) if bool(total.isfinite().all()) else float(total.sum())

    # ---- optimizers' steps

    def _step_starts(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch calls it before each step of each optimizer; of one that calls another's, or `super().step()`, for
        both. A gradient scaler that leaves a step out makes none."""
        if not self._stepping:
            try:
                self._check_step(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
            except HpcddpError as error:
                self._refuse(error)
        self._stepping.append(type(optimizer).__name__)

    def _check_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        one, batch = self._by_id.get(id(optimizer)), self._batch
        if batch is None:
            if one is not None:
                one.check_step_behind()
            return
        if one is None:
            self._check_foreign(optimizer)
            return
        if self._in_backward:
            raise mistakes.STEP_IN_BACKWARD.error(kind=one.kind)
        if (row := _STEP.get(self._at)) is not None:
            raise self._error(row, kind=one.kind)
        if self._backwards:
            if self._calls.are_watched:
                self._calls.check_averaged()
            if self._gradients.looks_before_steps and not self.stepped:
                self._gradients.collect(batch.parts[-1].micro)
        one.check_step(self._nth_batch, self._reaches_any, has_closure=has_closure)

    def _reaches_any(self) -> bool:
        """Whether a backward pass over this batch has reached some optimizer of the run."""
        return any(one.has_of(self._nth_batch) for one in self.optimizers)

    def _check_foreign(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._foreign or self._known is None:
            return
        if any(id(p) in self._known.all for group in optimizer.param_groups for p in group["params"]):
            kind = type(optimizer).__name__
            if self._in_backward:
                raise mistakes.STEP_IN_BACKWARD.error(kind=kind)
            raise mistakes.STEP_NOT_PREPARED.error(kind=kind)
        self._foreign.add(id(optimizer))

    def _step_ends(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        del self._stepping[-1:]
        one = self._by_id.get(id(optimizer))
        if one is not None:
            one.note_step()
            self.stepped = self.has_stepped = True
