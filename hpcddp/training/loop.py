"""Where a training loop is: its batch, the micro batch, the step. What belongs around each is done and checked here.

One batch of the training loader is one optimizer step. A run with `max_micro_batch` or in exact mode goes over each
batch in micro batches (`rt.micro_batches`); in any other a batch is one micro batch. Torch's optimizers are left as
they are: torch's own hooks for all optimizers say when one steps.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.training import mistakes, trial
from hpcddp.training.collectives import sum_over_data_ranks
from hpcddp.training.data.loader import Batch, Part, SecondLoader, Taken, are_in_proportion, holds
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import run_backward
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.progress import KnownParameters, OptimizerGradients
from hpcddp.training.pace import Pace
from hpcddp.training.parallel.calls import ForwardCalls
from hpcddp.training.setup import RunSetup
from hpcddp.training.steps import StepRecord
from hpcddp.training.torch_compat import has_scheduler

# Which loops a resumed run would find again: those over the loader, in epochs, and those over `rt.epochs`.


class EpochLoops:
    """Hears where such loops begin, and refuses those that train otherwise than they read."""

    def __init__(self) -> None:
        self.body: int | None = None  # the epoch whose body in rt.epochs runs
        self._outside: int | None = None  # that of a loop over the loader outside of rt.epochs
        self._most: int | None = None  # epochs that rt.epochs was asked for
        self._most_steps: int | None = None  # that rt.batches was asked for
        self._is_read = False  # whether a loop over the loader has begun

    def check_count(self, count: int, over: int) -> None:
        """`rt.epochs(count)` begins after `over` epochs. RequestError if the one before leaves it none."""
        if self._most is not None and count <= min(over, self._most):
            raise mistakes.NO_EPOCH_LEFT.error(count=count, most=self._most, over=over, more=self._most + count)
        self._most = max(count, self._most or 0)

    def check_steps(self, count: int, over: int) -> None:
        """`rt.batches(count)` begins after `over` steps. RequestError if the one before leaves it none."""
        if self._most_steps is not None and count <= min(over, self._most_steps):
            more = self._most_steps + count
            raise mistakes.NO_STEP_LEFT.error(count=count, most=self._most_steps, over=over, more=more)
        self._most_steps = max(count, self._most_steps or 0)

    def check_read(self, *, stepped: bool) -> None:
        """An epoch of rt.epochs is over. RequestError if no loop over the loader has begun, and an optimizer has
        stepped all the same, or no epoch is left."""
        if stepped and not self._is_read:
            raise mistakes.LOADER_UNUSED.error()

    def check_loop(self, epoch: int, *, is_open: bool) -> None:
        """A loop over the loader begins, with what is left of this epoch. `is_open`: rt.epochs has begun one.
        RequestError if it is a second one."""
        self._is_read = True
        if not is_open:
            if self._outside not in (None, epoch):
                raise mistakes.EPOCH_OUTSIDE.error()
            self._outside = epoch
        elif self.body is not None and epoch > self.body:
            raise mistakes.LOOP_TWICE.error(epoch=self.body + 1)


# How a script leaves the loop over `rt.epochs`: by `break` and `return`, or by an exception.


def is_left_by_exception() -> bool:
    """In a generator that is closed now: whether an exception ends the loop over it, and no `break` or `return`.

    Python has put the exception aside here. But its traceback holds the frame of the loop, at the instruction that the
    frame is at; so does no other, since `break` and `return` raise nothing.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame.f_back  # a generator between the two, such as a progress bar's, is closed by an exception anyway
    holders = gc.get_referrers(frame)
    return any(isinstance(one, TracebackType) and one.tb_lasti == frame.f_lasti for one in holders)


class TrainingLoop:
    """Hears from the training loader which batch the loop has, from the loop its backward passes, and from torch the
    steps of optimizers."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        record: StepRecord,
        pace: Pace,
        count_step: Callable[[MicroBatch], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.steps = 0  # optimizer steps since the start of the run, over all attempts, of batches that are over
        self.open_epoch: int | None = None  # the epoch of rt.epochs that the loop is in, or was left in
        self.in_tail = False  # whether the epoch's last step was made, and its body has not ended
        self.run_is_over = False  # whether the run was finished before
        self.epochs = EpochLoops()
        self.models: list[nn.Module] = []  # that have all their parameters on this rank
        self.calls = ForwardCalls()
        self.record = record
        self.begins: Callable[[], None] = lambda: None  # is called before a loop over the loader
        self.comes_to_step: Callable[[bool], None] = lambda _: None  # is called before each step: an epoch's last one?
        self.is_several = False  # whether the loader gives batches that `micro_batches` opens
        self.first_count: object = None  # what counts in the first loader's batches; None: samples
        self.seconds: list[SecondLoader] = []
        self.optimizers: list[OptimizerGradients] = []
        self.schedulers: list[LRScheduler] = []
        self.scalers: list[GradScaler] = []
        self.stepped = False  # whether an optimizer has stepped in this batch
        self.has_stepped = False  # in this attempt
        self.skipped_step: int | None = None  # the last batch in which none has, counted from 1
        self._layout, self._device, self._seed = setup.layout, setup.group.device, setup.options.seed
        self._data_rank, self._trial = setup.layout.data_rank, trial.current
        self._gradients = gradients
        self._pace = pace
        self._count_step = count_step
        self._is_stopping = is_stopping
        self._known: KnownParameters | None = None
        self._by_id: dict[int, OptimizerGradients] = {}
        self._foreign: set[int] = set()  # optimizers that step other models only, by id
        self._refused: HpcddpError | None = None  # the first error of this loop: while the run goes on, it was caught
        self._batch: Batch | None = None
        self._part: Part | None = None  # the micro batch that the loop is at
        self._open: ExitStack | None = None  # what is done around it
        self._nth_pass = self._nth_batch = 0
        self._backwards = 0  # of this batch
        self._backwards_of_pass = self._backwards_of_part = 0
        self._is_partial = False  # whether a pass over the micro batches was begun and is not over
        self._left_with: int | None = None  # backward passes of the batch when the loop over the batches was left
        self._depth = 0  # of optimizers' steps, one in the other
        self._stepping = ""  # the kind of the outermost
        self._in_backward = False
        self._had_backward = 0  # batches of this attempt

    # ---- what a run is made of

    def take(self, thing: object) -> None:
        """Follow this optimizer, scheduler or gradient scaler. Others are left alone."""
        if isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
        elif isinstance(thing, GradScaler):
            self.scalers.append(thing)
        elif isinstance(thing, Optimizer) and id(thing) not in self._by_id:
            assert self._known is not None
            self._by_id[id(thing)] = OptimizerGradients(thing, self._known)
            self.optimizers.append(self._by_id[id(thing)])

    @contextmanager
    def hearing(self, known: KnownParameters) -> Iterator[None]:
        """In the body torch says which optimizer steps. `known`: the parameters of the prepared models."""
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
    def stopping(self) -> bool:
        """Whether the loop is to end after this step."""
        return self._is_stopping()

    @property
    def steps_made(self) -> int:
        """As `steps`, with that of the batch that the loop is at, once an optimizer has stepped."""
        return self.steps + (self._batch is not None and self.stepped)

    def loop_starts(self, epoch: int) -> None:
        """The loop over an epoch's batches starts, at the first batch or where a resumed run continues."""
        self.check_caught()
        self.epochs.check_loop(epoch, is_open=self.open_epoch is not None)
        self.in_tail = False
        for second in self.seconds:
            second.forget()
        self.begins()
        self._pace.step_began()
        self.seed_between()

    def count_batch(self) -> None:
        """A loop over some loader gets a batch now."""
        self._pace.batches += 1

    def batch_starts(self, batch: Batch) -> None:
        """The loop gets this batch now. StopTraining where it is the epoch's last, and the run stops before that."""
        self.comes_to_step(batch.parts[0].micro.ends_epoch)
        self._pace.batches += 1
        self._batch, self.in_tail = batch, False
        self._nth_batch += 1
        self._backwards = self._nth_pass = 0
        self._left_with = None
        self.stepped = self._is_partial = False
        if not batch.is_several:
            self._start_pass()
            self._start_part(batch.parts[0])

    def batch_left(self, batch: Batch) -> None:
        """The loop was left in this batch; or `next(iter(loader))` has taken it, and it is still to be used."""
        if batch is self._batch:
            self._left_with = self._backwards
            self._pace.loop_left()

    def step_ends(self) -> None:
        """The loop is done with the batch: it counts as one step."""
        try:
            self._end_batch()
        except HpcddpError as error:
            self._refuse(error)

    def _end_batch(self) -> None:
        batch = self._batch
        if batch is None:
            raise RequestError("two loops over the training loader ran in turn", "one loop over it at a time")
        if self._is_partial:
            self._check_pass_is_over()
        if not self._backwards:
            beside = ", and an optimizer has stepped" if self.stepped else ""
            raise mistakes.BATCH_WITHOUT_BACKWARD.error(beside=beside)
        if self._depth:
            raise mistakes.STEP_LEFT.error(kind=self._stepping)
        self._end_part()
        self._batch = None
        for second in self.seconds:
            second.step_ends()
        self._had_backward += 1
        if self._had_backward == 1:
            self._check_schedulers()
        if not self.stepped:
            self.skipped_step = self.steps + 1
        self.steps += 1
        self._count_step(batch.parts[-1].micro)
        if self._trial is not None:
            self._trial.step_ends()

    def seed_between(self) -> None:
        """What draws random numbers before the next batch starts, draws by the number of steps."""
        seed_generators("between", self._seed, self.steps)

    def settle(self) -> None:
        """The loop was left, perhaps in the middle: end what is still open. A batch that was only looked at is none."""
        if self._batch is None:
            return
        if self._backwards or self.stepped:
            self.step_ends()
            self.seed_between()
        else:
            self.let_go()

    def let_go(self) -> None:
        """The `with` body has ended, perhaps by an exception in the middle of a batch."""
        self._end_part(collects=False)
        self._batch, self._is_partial, self._depth, self._in_backward = None, False, 0, False

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

    def check_trained(self) -> None:
        """At the end of the body. RequestError if several batches had backward passes, and no optimizer has stepped."""
        may_skip = any(scaler.is_enabled() for scaler in self.scalers)
        if self._had_backward > 1 and self.optimizers and not (self.has_stepped or may_skip):
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
    def is_left(self) -> bool:
        """Whether the loop over the batches was left, and no backward pass came since."""
        return self._batch is not None and self._left_with == self._backwards

    @property
    def batch(self) -> Batch:
        """The batch that the loop is at. RequestError outside the loop over the loader."""
        if self._batch is None:
            when = " (it was over)" if self._had_backward else ""
            raise mistakes.BACKWARD_OUTSIDE.error(when=when)
        return self._batch

    @property
    def samples(self) -> int:
        """Samples of this rank's batch, or micro batch, that count: 0 where it has a placeholder only."""
        parts = self.batch.parts if self._part is None else [self._part]
        return sum(part.micro.samples for part in parts)

    @property
    def smallest(self) -> int:
        """Samples of this rank's smallest micro batch of the batch that the loop is at."""
        return min(part.micro.samples for part in self.batch.parts)

    # ---- micro batches

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """See `Runtime.micro_batches`."""
        if not isinstance(batch, Batch):
            yield batch  # of a run whose batches are one micro batch each
            return
        try:
            if batch is not self._batch and not any(batch is one.batch for one in self._taken):
                raise mistakes.OTHER_BATCH.error()
            if self._part is not None:
                raise mistakes.MICRO_LOOPS_MIXED.error()
            self._check_pass_is_over()
            self._start_pass()
            for part, content in batch.contents():
                self._start_part(part)
                yield content
                self._check_backward()
                self._end_part()
            self._end_pass()
        except HpcddpError as error:
            self._refuse(error)
        finally:
            self._end_part(collects=False)

    def _start_pass(self) -> None:
        self._backwards_of_pass = 0
        self._nth_pass += 1
        if not self._gradients.adds_up_in_place:
            for one in self.optimizers:
                one.expect_batch(self._nth_batch)

    def _start_part(self, part: Part) -> None:
        micro = part.micro
        if micro.nth:
            self.count_batch()
        self._part, self._backwards_of_part = part, 0
        if self.calls.are_watched:
            self.calls.start()
        place: tuple[int | str, ...] = (self._data_rank, micro.nth) if micro.slice is None else ("slice", micro.slice)
        again = (self._nth_pass - 1,) if self._nth_pass > 1 else ()
        if self._trial is not None:
            place = self._trial.key(place, micro)
        seed_generators("step", self._seed, self.steps, *place, *again)
        is_whole = micro.last and not micro.nth and micro.samples > 0
        if not (is_whole and self._gradients.adds_up_in_place):
            self._open = ExitStack()
            self._open.enter_context(self._gradients.micro(micro))
        if micro.nth == 0 and not self._gradients.adds_up_in_place:
            for one in self.optimizers:
                one.mark()
        if self._trial is not None:
            self._trial.part_starts(micro)

    def _check_backward(self) -> None:
        """A micro batch is over: all of a pass have a backward pass, or none."""
        assert self._part is not None
        nth = self._part.micro.nth
        had_before = self._backwards_of_pass > self._backwards_of_part
        if nth and (self._backwards_of_part > 0) != had_before:
            done = nth if had_before else 1
            raise mistakes.MICRO_BATCH_LEFT_OUT.error(done=done, all=nth + 1)

    def _end_part(self, *, collects: bool = True) -> None:
        part, self._part = self._part, None
        opened, self._open = self._open, None
        if part is None:
            return
        try:
            if not self._gradients.adds_up_in_place:
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
        self._is_partial = False
        if not self._gradients.adds_up_in_place:
            if self._backwards_of_pass:
                for one in self.optimizers:
                    one.note_backward(self._nth_batch)
            self._gradients.pass_ends()

    def _check_pass_is_over(self) -> None:
        if self._is_partial:
            parts = len(self.batch.parts)
            raise mistakes.MICRO_BATCH_LEFT_OUT.error(done="some", all=parts)

    # ---- backward passes

    @property
    def _taken(self) -> list[Taken]:
        """The batches that loops over second loaders have taken for this step."""
        return [one for second in self.seconds for one in second.taken]

    def _find_part(self, of: Any) -> Part:
        """The batch that a loss comes from, by the batch itself or a tensor of it. None: all that the loop has now."""
        part = self._part
        if part is None:
            raise (mistakes.MICRO_LOOP_MISSING.error() if self.batch.is_several else _outside())
        if not (self.seconds or of is not None) or self.batch.is_several:
            return part  # the loop over its micro batches says it
        if of is None:
            for second in self.seconds:
                for one in second.taken:
                    self._check_shares(part, second, one.batch.parts[0])
            return part
        found = [one.batch.parts[0] for one in reversed(self._taken) if holds(one.batch.content, of)]
        if not found and not holds(self.batch.content, of):
            raise mistakes.OF_UNKNOWN.error()
        return found[0] if found else part

    def _find_batch(self, of: Any) -> Batch:
        """The same behind a loop over micro batches."""
        batches = [self.batch, *(one.batch for one in self._taken)]
        found = [one for one in batches if one is of or (of is None and not self.seconds)]
        if not found:
            raise mistakes.OF_UNKNOWN.error()
        return found[0]

    def _check_shares(self, part: Part, second: SecondLoader, other: Part) -> None:
        ranks, first, more = self._layout.data_size, part.micro, other.micro
        if ranks == 1:
            return
        if self.first_count is not None or second.weighing.count is not None:
            raise mistakes.COUNTS_OF_TWO.error()
        if not are_in_proportion(first, more, ranks):
            raise mistakes.SHARES_DIFFER.error(first=first.total, second=more.total, number=second.number, ranks=ranks)

    def backward(self, loss: Tensor, *, summed: bool, scaler: GradScaler | None, of: Any = None) -> None:
        """See `Runtime.backward`."""
        try:
            part = self._find_part(of)
            for second in self.seconds:
                second.use()
            if scaler is not None or self.scalers:
                self._check_scaler(scaler)
            self._expect_backward(part.micro)
            self._in_backward = True
            try:
                with self.calls.checked() if self.calls.are_watched else nullcontext():
                    factor = run_backward(loss, part.micro, part.weight, self.models, summed=summed, scaler=scaler)
            finally:
                self._in_backward = False
            self._note_backward(part.micro)
        except HpcddpError as error:
            self._refuse(error)
        if factor is not None:
            self.record.sums.add_loss(loss.detach(), factor, part.micro.slice or 0)
        if self._trial is not None:
            self._trial.backward(loss.detach(), float(factor or 0.0) / self._gradients.averaged_over)

    def _expect_backward(self, micro: MicroBatch) -> None:
        in_place, alone = self._gradients.adds_up_in_place, len(self.optimizers) == 1
        is_first = micro.nth == 0
        for one in self.optimizers:
            if in_place and is_first:
                one.expect_batch(self._nth_batch)
            elif one.unmark() or (in_place and self._backwards_of_pass and one.were_changed()):
                raise mistakes.GRADIENTS_CHANGED.error()
            if is_first and not (self._backwards_of_part and self.batch.is_several):
                one.expect_backward(alone=alone)

    def _note_backward(self, micro: MicroBatch) -> None:
        self._backwards += 1
        self._backwards_of_pass += 1
        self._backwards_of_part += 1
        self._is_partial = self._batch is not None and self._batch.is_several
        if not self._gradients.adds_up_in_place:
            self._gradients.backward_ends(micro)
        for one in self.optimizers:
            if micro.last and self._gradients.adds_up_in_place:
                one.note_backward(self._nth_batch)
            else:
                one.look()

    def _check_scaler(self, scaler: GradScaler | None) -> None:
        if scaler is not None:
            if scaler.is_enabled() and scaler not in self.scalers:
                raise mistakes.SCALER_NOT_PREPARED.error()
        elif self.scalers and any(one.is_enabled() for one in self.scalers):
            raise mistakes.SCALER_MISSING.error()

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
        total = sum_over_data_ranks(torch.tensor(sums, dtype=torch.float64), self._layout, self._device)
        return math.fsum(total.tolist()) if bool(total.isfinite().all()) else float(total.sum())

    # ---- optimizers' steps

    def _step_starts(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch calls it before each step of each optimizer; of one that calls another's, or `super().step()`, for
        both. A gradient scaler that leaves a step out makes none."""
        if self._depth == 0:
            try:
                if self._batch is not None:
                    self._check_step(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
                elif (one := self._by_id.get(id(optimizer))) is not None:
                    one.check_step_behind()
            except HpcddpError as error:
                self._refuse(error)
        if self._depth == 0:
            self._stepping = type(optimizer).__name__
        self._depth += 1

    def _check_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        one = self._by_id.get(id(optimizer))
        if one is None:
            self._check_foreign(optimizer)
            return
        if self._in_backward:
            raise mistakes.STEP_IN_BACKWARD.error(kind=one.kind)
        batch = self._batch
        assert batch is not None
        if batch.is_several and (self._part is not None or self._is_partial):
            raise mistakes.STEP_EARLY.error(kind=one.kind)
        if self._backwards:
            if self.calls.are_watched:
                self.calls.check_averaged(is_early=self._had_backward < 2)
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
            outer = find_outer(optimizer, [one.optimizer for one in self.optimizers])
            hint = "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers"
            if outer:
                hint = f"model, optimizer, inner, loader = rt.prepare(model, optimizer, optimizer.{outer}, loader)"
            raise mistakes.STEP_NOT_PREPARED.error(kind=kind, hint=hint)
        self._foreign.add(id(optimizer))

    def _step_ends(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        one = self._by_id.get(id(optimizer))
        if one is not None:
            one.note_step()
            self.stepped = self.has_stepped = True

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer has begun a step and not ended it, as after an exception in it."""
        return self._depth > 0


def find_outer(inner: Optimizer, optimizers: Sequence[Optimizer]) -> str:
    """The name of the attribute of one among `optimizers` that `inner` is, such as of one for SAM; "" if it is none."""
    return next((name for outer in optimizers for name, thing in vars(outer).items() if thing is inner), "")


def _outside() -> RequestError:
    return mistakes.BACKWARD_OUTSIDE.error(when=", or behind it")
