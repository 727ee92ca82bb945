"""The micro batch and the global batch that a training loop is at: what belongs around each, done and checked."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import TracebackType

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight
from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.gate.unprepared import (
    LOOP,
    DroppedBatches,
    FirstSteps,
    GradientsBetween,
    check_order,
    check_schedulers,
    check_step,
    refuse_outside,
)
from hpcddp.training.gradient.backward import run_backward
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.pace import Pace
from hpcddp.training.parallel.calls import ForwardCalls
from hpcddp.training.steps import StepRecord

# Which loops a resumed run would find again: those over the loader, in epochs, and those over `rt.epochs`.


class EpochLoops:
    """Hears where such loops begin, and refuses those that train otherwise than they read."""

    def __init__(self) -> None:
        self.body: int | None = None  # the epoch whose body in rt.epochs runs
        self._outside: int | None = None  # that of a loop over the loader outside of rt.epochs
        self._most: int | None = None  # epochs that rt.epochs was asked for
        self._is_read = False  # whether a loop over the loader has begun

    def check_count(self, count: int, over: int) -> None:
        """`rt.epochs(count)` begins after `over` epochs. RequestError if the one before leaves it none."""
        if self._most is not None and count <= min(over, self._most):
            raise RequestError(
                f"rt.epochs({count}) came after rt.epochs({self._most}), and {over} epochs are over: it counts from the"
                " start of the run, so that none is left",
                f"rt.epochs({self._most + count}) for {count} more",
            )
        self._most = max(count, self._most or 0)

    def check_read(self, *, stepped: bool) -> None:
        """An epoch of rt.epochs is over. RequestError if no loop over the loader has begun, and the script has called
        for a step all the same, or no epoch is left."""
        if stepped and not self._is_read:
            raise RequestError(
                "an epoch of rt.epochs() ended, and no loop over the training loader has begun: a loop over another one"
                " gives each rank all of the data, and none of its steps is counted",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader), then for x, y in loader: …",
            )

    def check_loop(self, epoch: int, *, is_open: bool) -> None:
        """A loop over the loader begins, with what is left of this epoch. `is_open`: rt.epochs has begun one.
        RequestError if it is a second one."""
        self._is_read = True
        if not is_open:
            if self._outside not in (None, epoch):
                raise RequestError(
                    "a second epoch began outside of rt.epochs(): a resumed run would not know how many are left",
                    "for epoch in rt.epochs(10): for x, y in loader: …",
                )
            self._outside = epoch
        elif self.body is not None and epoch > self.body:
            raise RequestError(
                f"a second loop over the loader began in epoch {self.body + 1} of rt.epochs(), after its last batch: a"
                " resumed run would not know of it",
                "for epoch in rt.epochs(2 * 10): for x, y in loader: …, where each loop is an epoch and epoch % 2 says"
                " which one; or loader.steps() for several passes over each global batch",
            )


# How a script leaves the loop over `rt.epochs`: by `break` and `return`, by an exception, or past an error.


_OWN = "hpcddp.training."


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


class CaughtErrors:
    """The first error that hpcddp raised in the loop. As long as the run goes on, the script has caught it."""

    def __init__(self, is_watched: Callable[[], bool]) -> None:
        self._is_watched = is_watched
        self._first: HpcddpError | None = None
        self._thread: int | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Errors that the training's own rooms make in the body are noted, in the loop."""
        self._thread = get_ident()  # another one's are raised again where the run asks for its result
        HpcddpError.listeners.append(self._note)
        try:
            yield
        finally:
            HpcddpError.listeners.remove(self._note)

    def check(self) -> None:
        """RequestError if there was one."""
        if self._first is not None:
            raise RequestError(
                f"the script caught an error of this run and went on: {self._first.message}", self._first.hint
            ) from self._first

    def _note(self, error: HpcddpError) -> None:
        made_in = sys._getframe(2)
        while made_in.f_code.co_name == "__init__" and made_in.f_back is not None:  # of a kind of error
            made_in = made_in.f_back
        own = str(made_in.f_globals.get("__name__")).startswith(_OWN)
        if self._first is None and own and get_ident() == self._thread and self._is_watched():
            self._first = error


_READ_STEPS = 2  # steps of an attempt in which marked gradients are read


class TrainingLoop:
    """Hears from the training loader where the loop is, and from the loop what it does there."""

    def __init__(
        self,
        seed: int,
        gradients: Gradients,
        record: StepRecord,
        pace: Pace,
        count_step: Callable[[MicroBatch], None],
        is_stopping: Callable[[], bool],
        dropped: DroppedBatches,
    ) -> None:
        self.steps = 0  # optimizer steps since the start of the run, over all attempts, of global batches that are over
        self.open_epoch: int | None = None  # the epoch of rt.epochs that the loop is in, or was left in
        self.in_tail = False  # whether the epoch's last step was made, and its body has not ended
        self.run_is_over = False  # whether the run was finished before
        self.epochs = EpochLoops()
        self.caught = CaughtErrors(lambda: self.inside or self.epochs.body is not None)
        self.models: list[nn.Module] = []  # that have all their parameters on this rank
        self.calls = ForwardCalls()
        self.gate = StepGate(self)
        self.skipped_step: int | None = None  # the last that rt.skip_step left out, counted from 1
        self.backwards = self.backwards_before_pass = 0
        self._seed = seed
        self._gradients = gradients
        self.record = record
        self.begins: Callable[[], None] = lambda: None  # is called before a loop over the loader
        self.comes_to_last_step: Callable[[], None] = lambda: None  # is called before an epoch's last step
        self._pace = pace
        self._count_step = count_step
        self._is_stopping = is_stopping
        self._micro: MicroBatch | None = None
        self._weight: Weight | None = None
        self._open: ExitStack | None = None
        self._collected = False
        self._backwards_before_step = self._backwards_before_micro = 0
        self._between = GradientsBetween(self.gate)
        self.first = FirstSteps(self.gate)
        self._dropped = dropped
        self._ended = 0  # steps of this attempt, of global batches that are over
        self._left_at = -1  # backward passes before the loop over the batches was left

    # ---- what the loader says

    @property
    def stopping(self) -> bool:
        """Whether the loop is to end after this step."""
        return self._is_stopping()

    @property
    def steps_made(self) -> int:
        """As `steps`, with that of the global batch that the loop is at, once an optimizer has stepped."""
        return self.steps + (self._micro is not None and self._micro.last and self.gate.acted)

    def loop_starts(self, epoch: int) -> None:
        """The loop over an epoch's batches starts, at the first batch or where a resumed run continues."""
        self.caught.check()
        self.epochs.check_loop(epoch, is_open=self.open_epoch is not None)
        self.in_tail = False
        self.begins()
        self._pace.step_began()
        self.seed_between()

    def last_step_starts(self) -> None:
        """The loop is about to get the epoch's last global batch."""
        self.comes_to_last_step()

    def count_batch(self) -> None:
        """A loop over some loader gets a batch now."""
        self._pace.batches += 1

    def micro_batch_starts(self, micro: MicroBatch, weight: Weight, nth_pass: int) -> None:
        """The loop gets this micro batch now."""
        self.count_batch()
        if micro.nth == 0:
            self.backwards_before_pass = self.backwards
            self._between.forget()
            if nth_pass == 0:
                self._backwards_before_step = self.backwards
                self.gate.batch_starts()
        self._backwards_before_micro, self._left_at = self.backwards, -1
        self._micro, self._weight = micro, weight
        self._collected = self.gate.asked = self.gate.asked_last = False
        if self._ended < _READ_STEPS:
            self.first.start(micro)
        self.calls.start()
        seed_generators("step", self._seed, self.steps, *self._gradients.key(micro), *([nth_pass] if nth_pass else ()))
        self._open = ExitStack()
        self._open.enter_context(self._gradients.micro(micro))

    def loop_left(self, micro: MicroBatch) -> None:
        """The loop was left in this micro batch; or `next(iter(loader))` has taken it, and it is still to be used."""
        if micro is self._micro:
            self._left_at = self.backwards
            self._pace.loop_left()

    def micro_batch_ends(self) -> None:
        """The loop has done what it does with the micro batch."""
        self._check_none_passed_over()
        self._close_micro_batch()

    def _close_micro_batch(self) -> None:
        if self._open is not None:
            self.collect()
            self._open.close()
            self._open = None

    def step_ends(self) -> None:
        """The loop is done with the global batch: its step counts, if there was one."""
        micro, self._micro = self._micro, None
        if micro is None or not micro.last:
            raise RequestError(
                "the loop left a global batch before its last micro batch",
                "for step in loader.steps(): for x in step: …",
            )
        check_step(self.gate, micro.total, had_backward=self.backwards > self._backwards_before_step)
        self._ended += 1
        if self._ended == 1:
            check_schedulers(self.gate)
        for seen in self.gate.optimizers:
            seen.gradients.look()
        self.steps += 1
        self._count_step(micro)

    def seed_between(self) -> None:
        """What draws random numbers before the next micro batch starts, draws by the number of steps."""
        seed_generators("between", self._seed, self.steps)

    def settle(self) -> None:
        """The loop was left, perhaps in the middle: end what is still open."""
        is_unused = self.is_left and self.accumulates and not (self.has_backward or self.gate.acted)
        if is_unused:
            self.close()
        self._close_micro_batch()
        if self._micro is None:
            return
        if self._micro.last and not is_unused and (self.gate.acted or self.backwards != self._backwards_before_step):
            self.step_ends()
            self.seed_between()
        else:  # half a global batch makes no step, nor does one that was only looked at
            self._micro = None
            self._clear()
            if self.backwards != self._backwards_before_step:
                self._dropped.note(self._ended)

    def check_trained(self) -> None:
        """At the end of the body. RequestError if backward passes were made, and no step."""
        self._dropped.check_trained(self._ended)

    def let_go(self) -> None:
        """The `with` body has ended, perhaps by an exception in the middle of a global batch."""
        is_partial, self._micro = self._micro is not None, None
        self.gate.let_go()
        self.close()
        if is_partial:
            self._clear()

    def _clear(self) -> None:
        for seen in self.gate.optimizers:
            seen.clear()

    def close(self) -> None:
        """The body has ended, also by an exception: what is done around a micro batch is undone."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    # ---- what the loop does

    @property
    def micro(self) -> MicroBatch:
        """The micro batch that the loop is at. RequestError outside of the loop over the loader."""
        if self._micro is None:
            raise refuse_outside(is_over=self._ended > 0)
        return self._micro

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass was made in this micro batch."""
        return self.backwards > self._backwards_before_micro

    @property
    def inside(self) -> bool:
        """Whether the loop has taken a batch and its step has not ended."""
        return self._micro is not None

    @property
    def is_in_epoch(self) -> bool:
        """Whether the loop is in the body of `rt.epochs`, or in a global batch."""
        return self._micro is not None or self.epochs.body is not None

    @property
    def acts(self) -> bool:
        """Whether this is the last micro batch of a pass, or no micro batch at all."""
        return self._micro is None or self._micro.last

    @property
    def is_left(self) -> bool:
        """Whether the loop over the batches was left, and no backward pass came since."""
        return self._left_at == self.backwards

    @property
    def accumulates(self) -> bool:
        """Whether the pass has several micro batches, and the loop is in one of them."""
        return self._open is not None and self._micro is not None and not (self._micro.last and self._micro.nth == 0)

    def backward(self, loss: Tensor, *, summed: bool, scaler: GradScaler | None) -> None:
        """See `Runtime.backward`."""
        micro, weight = self.micro, self._weight
        if self._open is None or weight is None:
            raise RequestError("rt.backward(loss) came after the loop had left its batch", LOOP)
        check_order(
            self.gate, accumulates=self.accumulates, is_taken=self._collected and not self._gradients.adds_up_in_place
        )
        self.gate.scaled.check_prepared(scaler, loss)
        self._between.check()
        if self._ended < _READ_STEPS and not self.has_backward:
            is_again = self.backwards_before_pass > self._backwards_before_step
            self.first.look(loss, micro, weight, summed=summed, is_again=is_again)
        scaled = scaler is not None and scaler.is_enabled()
        self.gate.backward_starts(scaled=scaled)
        with self.calls.checked():
            factor = run_backward(loss, micro, weight, self.models, summed=summed, scaler=scaler)
        self.backwards += 1
        self.gate.backward_ends(scaled=scaled)
        self._gradients.backward_ends(micro)
        is_between = self.accumulates and not micro.last
        self._between.mark(is_last=not is_between, are_alone=not self.calls.watched, read=self._ended < _READ_STEPS)
        if factor is not None:
            self.record.add_loss(loss.detach(), factor, self._gradients.slot(micro))

    def skip(self, optimizers: Sequence[Optimizer]) -> bool:
        """See `Runtime.skip_step`."""
        if self.micro.last and self.backwards == self._backwards_before_step:
            raise RequestError(
                "rt.skip_step() came without rt.backward(loss) in this global batch",
                "rt.backward(loss) in each micro batch, on all ranks, then rt.skip_step()",
            )
        if not self.gate.skip(optimizers):
            return False
        self.skipped_step = self.steps + 1
        return True

    def collect(self) -> None:
        """Make the gradient of the global batch, or note that of this micro batch, if that was not done yet."""
        if self._collected or self._open is None or self._micro is None or self._weight is None:
            return
        if self._micro.last:
            self._check_none_passed_over()
        self._collected = True
        self._between.check()
        if not self._gradients.adds_up_in_place:  # each micro batch's are taken away
            self._between.forget()
        if self._micro.last and self.backwards > self._backwards_before_step:
            self.calls.check_averaged(is_early=self._ended < _READ_STEPS)
        self._gradients.collect(self._micro)
        self.gate.note_places(looks=self._ended < _READ_STEPS)

    def _check_none_passed_over(self) -> None:
        """RequestError if some micro batches of this pass had a backward pass by now, and others had none."""
        micro = self._micro
        had_before = self._backwards_before_micro > self.backwards_before_pass
        if micro is not None and micro.nth > 0 and self.has_backward != had_before:
            raise RequestError(
                f"{micro.nth if self.has_backward else 1} of the {micro.nth + 1} micro batches so far of this pass over"
                " the global batch had no rt.backward(loss): their samples would count without a gradient",
                "rt.backward(loss) in each micro batch; to leave the whole step out: rt.backward(loss), then"
                " rt.skip_step() at its last micro batch",
            )
