"""Helpers for a training loop. Loop, model and optimizer stay the user's own; `hpcddp.runtime` shows such a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn, stack
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.state import AT_ITS_END
from hpcddp.training.arguments import check_kind, read_epochs, read_path, read_value, read_whole
from hpcddp.training.checkpoint.attempt import AttemptSaves
from hpcddp.training.checkpoint.best import check_same_value
from hpcddp.training.checkpoint.checkpointer import Checkpointer
from hpcddp.training.checkpoint.position import describe_position
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.checkpoint.whole_model import write_whole
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.loop import TrainingLoop, is_left_by_exception
from hpcddp.training.pace import STEPS_UNTIL_AGREED
from hpcddp.training.parallel.sameness import CHECKED_FIRST
from hpcddp.training.prepare import Preparation
from hpcddp.training.remarks import find_empty_ranks, print_warning
from hpcddp.training.report import Report, Summary
from hpcddp.training.setup import RunSetup
from hpcddp.training.steps import StepRecord
from hpcddp.training.stopping import DEADLINE, FINISH, SAVE, STOP, STOP_FLAGS, StopTraining, StopWatch


class Runtime(Preparation):
    """The value of `hpcddp.runtime()`: one per training run."""

    _save_asked = False
    _is_behind_batches = False  # in a tail, whose step is only counted now
    _finish_reason: str | None = None
    _left: str | None = None  # the epoch of `epochs` that the loop is in, or `batches`
    _last_step: int | None = None  # of the loop over `batches` that is open
    _loop_was_left = False  # by `break` or `return`
    _broken_off: str | None = None  # where an exception left it

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        watch: StopWatch,
        metrics: MetricsFile,
        report: Report,
        planned: Callable[[BatchPlan], None],
        until_end: ExitStack,
    ) -> None:
        record = StepRecord(setup, gradients, metrics)
        is_first = setup.group.is_first
        saves = AttemptSaves(setup.folder, watch, is_first=is_first, every_s=setup.options.save_s)
        checkpointer = Checkpointer(setup, saves)
        loop = TrainingLoop(setup, gradients, record, watch.pace, self._count_step, lambda: self._is_ending)
        super().__init__(setup, gradients, loop, checkpointer, report, planned, until_end)
        loop.begins, loop.comes_to_step = self._begin_loop, self._come_to_step
        self.metrics = metrics
        self.weights_sha256: str | None = None  # of the tracked models at the end, on rank 0
        self._watch, self._record, self._saves = watch, record, saves
        loop.run_is_over = self._is_finished
        self._finish_reason = None if setup.over in {"", AT_ITS_END} else setup.over  # it finished early
        until_end.callback(loop.let_go)

    # ---- what is so

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self._loader.sampler.epoch if self._loader is not None else 0

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops here, to be resumed by a later attempt; set on all ranks at the same step."""
        return self._saves.stop_reason

    @property
    def stopping(self) -> bool:
        """Whether the loop ends here; a later attempt resumes it."""
        return self.stop_reason is not None

    @property
    def _is_ending(self) -> bool:
        return self._saves.stop_reason is not None or self._finish_reason is not None or self._is_finished

    # ---- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, which counts from the start of the run: two more after `rt.epochs(3)`
        are `rt.epochs(5)`. Leaving the inner loop early skips the rest of its epoch.

        If the run has to stop before its end, the `with` body is left from here or from the loop over the loader, and
        never between an epoch's last step and the end of its body. A loop that `break` or `return` leaves has finished
        early; `stop` or an exception leaves it unfinished.
        """
        count, sampler, loop = read_epochs(count), self._need_loader().sampler, self._loop
        loop.settle()  # of a loop before, which was left in a step
        self._open_again("epochs", count)
        loop.in_tail = False
        if not self._is_ending:
            loop.epochs.check_count(count, sampler.epoch)
        print_warning(find_empty_ranks(loop.models, self.plan, sampler.length), is_first=self.is_main)
        self._checkpointer.check_untouched(is_finished=self._is_finished)
        self._agree("began the loop over rt.epochs()")
        while (epoch := sampler.epoch) < count and not self._is_ending:
            loop.open_epoch = loop.epochs.body = epoch
            self._broken_off = None
            self._left = f"the loop left epoch {epoch + 1} of {count}"
            self._report.expect(self.steps, count - epoch, sampler.length, sampler.position, self.plan.global_batch)
            seed_generators("epoch", self.seed, epoch)
            try:
                yield epoch
            except GeneratorExit:
                self._loop_was_left = True
                if is_left_by_exception():
                    self._broken_off = "inside a step" if loop.inside or loop.is_in_step else "between steps"
                raise
            finally:
                loop.epochs.body = None
            loop.check_caught()
            loop.epochs.check_read(stepped=loop.has_stepped or epoch + 1 == count)
            self._end_steps()
            self._agree_to_go_on(f"ended epoch {epoch + 1} of {count}", 0 if epoch + 1 == count else STEPS_UNTIL_AGREED)
            self._left = None
            loop.open_epoch, loop.in_tail = None, False
            self._report.clear()
            self._watch.pace.tail_ended(early=sampler.epoch == epoch)
            sampler.end_epoch(epoch)
            for second in loop.seconds:
                second.epoch_ends()
            if self._options.saves_at_epoch_ends or self._save_asked:
                self._save_now()
        self._leave_if_stopping()

    def batches(self, steps: int) -> Iterator[Any]:
        """The batches of the training loader, pass after pass, until the run has made so many steps, which count from
        its start: a loop without epochs. A run that resumes goes on where it was.

            for x, y in rt.batches(10_000):
                …
                if (rt.steps + 1) % 500 == 0:
                    rt.save_best(evaluate(model))

        If the run has to stop before its end, the `with` body is left from here. A loop that `break` or `return` leaves
        has finished early.
        """
        count, loader, loop = read_whole(steps, "rt.batches({})", least=0), self._need_loader(), self._loop
        loop.settle()
        self._open_again("steps", count)
        loop.in_tail = False
        if not self._is_ending:
            loop.epochs.check_steps(count, self.steps)
        print_warning(find_empty_ranks(loop.models, self.plan, loader.sampler.length), is_first=self.is_main)
        self._checkpointer.check_untouched(is_finished=self._is_finished)
        self._agree("began the loop over rt.batches()")
        self._report.expect_steps(count)
        self._last_step = count
        while self.steps < count and not self._is_ending:
            loop.open_epoch, self._broken_off = self.epoch, None
            self._left = f"the loop left rt.batches({count})"
            for batch in loader:
                try:
                    yield batch
                except GeneratorExit:
                    self._loop_was_left = True
                    if is_left_by_exception():
                        self._broken_off = "inside a step" if loop.inside or loop.is_in_step else "between steps"
                    raise
                if self.steps + 1 == count:
                    break
            loop.check_caught()
            if loop.inside:
                self._end_steps(loop.step_ends)
                loop.seed_between()
        self._last_step = self._left = loop.open_epoch = None
        loop.in_tail = False
        self._report.clear()
        if not self._is_finished and (self._options.saves_at_epoch_ends or self._save_asked):
            self._agree_to_go_on(f"ended rt.batches({count})", 0)
            self._save_now()
        self._leave_if_stopping()

    def _open_again(self, unit: str, count: int) -> None:
        """A finished run goes on if more epochs or steps are asked for than it was finished with."""
        before = self._asked.get(unit)
        if self._is_finished and before is not None and count > before:
            self._is_finished, self._finish_reason = False, None
            self._loop.run_is_over = False
        self._asked = {unit: max(count, before or 0)}

    def _begin_loop(self) -> None:
        """A loop over the loader begins, perhaps over the rest of an epoch."""
        if self._loop.open_epoch is None:
            self._checkpointer.check_untouched(is_finished=self._is_finished)
        if self._save_asked:
            self._save_now()
        self._leave_if_stopping()

    def _end_steps(self, end: Callable[[], None] | None = None) -> None:
        """In the tail of an epoch: if the loop left its batches by `break`, the step before is counted only now."""
        self._is_behind_batches = True
        (end or self._loop.settle)()
        self._is_behind_batches = False

    def _come_to_step(self, ends_epoch: bool) -> None:
        """Before a step."""
        is_last = ends_epoch if self._last_step is None else self.steps + 1 == self._last_step
        if is_last and not self._may_end_with_second:
            self._come_to_last_step()

    @property
    def _may_end_with_second(self) -> bool:
        """Whether a loop over a second loader is used up: a zip of the two ends with it, so that the last step was the
        epoch's last one. If it was not, another step follows."""
        return bool(self._loop.seconds) and any(second.is_used_up for second in self._loop.seconds)

    def _come_to_last_step(self) -> None:
        """Before an epoch's last step: stop here if there is no time for that and for what follows it, such as an
        evaluation, which nothing interrupts; and save where it may be long."""
        of = "the loop" if self._last_step is not None else f"epoch {self.epoch + 1}"
        is_long = self._agree_to_go_on(f"came to the last step of {of}", 1, tail=True)
        if self._watch.pace.steps and (is_long or self._save_asked or self.stopping):
            self._save_now()
        self._leave_if_stopping()

    def _agree_to_go_on(self, point: str, steps: int, *, tail: bool = False) -> bool:
        """A collective: stop here if a rank has no time for so many more steps, or another reason. Returns whether the
        tail of an epoch takes long, or an unknown time.

        An attempt makes a step before it looks at the time, so that a chain of them comes to its end.
        """
        flags = self._watch.flags(steps, tail=tail)
        if not self._watch.pace.steps:
            flags = tuple(flag for flag in flags if flag != DEADLINE)
        answers = self._agree(point, (flags, self._watch.pace.tail_is_long))
        raised = {flag for flags, _ in answers for flag in flags}
        self._saves.note_stop(next((flag for flag in STOP_FLAGS if flag in raised), None))
        return bool(answers[0][1])

    def _count_step(self, micro: MicroBatch) -> None:
        """A global batch is over and its optimizer step made: count it, exchange flags, save or stop if it is time.

        After an epoch's last step all of that waits for the end of the body.
        """
        assert self._loader is not None
        loader, record, pace, step = self._loader, self._record, self._watch.pace, self._loop.steps
        epoch, saves = loader.sampler.epoch, self._saves
        ends = micro.ends_epoch if self._last_step is None else step == self._last_step
        is_last = ends or self._is_behind_batches or bool(self._loop.seconds and self._may_end_with_second)
        loader.sampler.advance(micro)
        pace.step_ended(in_tail=self._is_behind_batches)
        stop = record.end_step(
            loader.weighing,
            lambda: (() if is_last else self._watch.flags()) + tuple(self._agreement.requests),
            samples=micro.total,
            step=step,
            epoch=epoch,
            lr=self._checkpointer.learning_rate() if self.metrics.is_open else None,
        )
        pace.steps_shared = record.sums.steps_shared
        self._report.step(step, micro.total, record.loss)
        if stop is not None:
            saves.note_stop(stop)
        if saves.timer is not None and saves.timer.is_due:
            self._ask_to_save()
        several = self.group.world_size > 1  # one rank alone has agreed when it asked
        if several and not is_last and self._agreement.is_due(step, record.sums, record.exchanged):
            self._agree(f"ended step {step}")
        if pace.steps <= CHECKED_FIRST:
            self._check_first_steps()
        every = self._options.save_every.steps
        self._save_asked |= every is not None and step % every == 0
        self._loop.in_tail = is_last or (self._finish_reason is not None and saves.stop_reason is None)
        if self._loop.in_tail:
            return
        if self._save_asked or saves.stop_reason is not None:
            self._save_now()
        if self._checkpointer.may_write_beside:
            self._checkpointer.poll(wait=self._is_ending)
        if saves.stop_reason is not None:
            raise StopTraining

    def _leave_if_stopping(self) -> None:
        if self.stopping:
            raise StopTraining

    def stop(self, reason: str) -> None:
        """Leave the `with` body after this step; a later attempt resumes it. In and after an epoch's last step: at the
        end of the loop's body.

        One rank is enough. Inside a step the others hear of it a step later (of steps that take less than 25 ms up to
        16 steps later), and all stop there; if every rank calls it at the same step, all stop after that step.
        """
        self._ask(STOP, reason)

    def finish_early(self, reason: str) -> None:
        """End the loop after this step; the run is finished. Called as `stop` is."""
        self._ask(FINISH, reason)

    # ---- the end

    def finish(self) -> None:
        """The body has ended without an error: last numbers, last checkpoint, state.json. `open_runtime` calls it."""
        self._loop.check_caught()
        whole = self._broken_off != "inside a step"  # else an optimizer may have moved some of the weights
        with suppress(StopTraining):
            if whole:
                self._loop.settle()
        if whole:
            self._loop.check_trained()
        self._agree("ended the `with` body")
        self._record.catch_up(self._loader.weighing if self._loader is not None else None)
        for loader in (self._loader, *self._loop.seconds):
            if loader is not None:
                loader.close()
        self._check_state(at_end=True)
        if self._broken_off and self._left and not self._finish_reason:
            self._saves.note_stop(f"{self._left} by an exception")
        if whole and not (self._broken_off and self._loop.in_tail):
            self._save_now()
        # of the one epoch that a loop outside of rt.epochs makes, all is done
        stop_reason = None if self._loop.in_tail and self._loop.open_epoch is None else self.stop_reason
        self._finish_reason = self._finish_reason or self._left  # by `break` or `return`
        self.weights_sha256 = self._checkpointer.finish(
            stop_reason,
            step=self.steps,
            epoch=self.epoch,
            finished=self._finish_reason,
            asked=self._asked,
        )
        self._report.end(
            Summary(
                self.steps,
                stop_reason=stop_reason,
                finish_reason=self._finish_reason,
                epochs=self.epoch,
                loss=self._record.loss,
                weights_sha256=self.weights_sha256,
                is_exact=self.exact,
            )
        )

    # ---- from a batch to an optimizer's step

    @property
    def samples(self) -> int:
        """Samples of this rank's batch, or micro batch, that count: 0 where it has a placeholder only, as in an epoch's
        last batch of fewer samples than ranks."""
        return self._loop.samples

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """The micro batches of a batch, each as its samples collate, on the device. With `max_micro_batch` or `exact`
        every loop needs it:

            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(loss_fn(model(x), y))
                optimizer.step()

        A second loop over the same batch is another pass over it, as two optimizers that take turns need. In a run
        without either it gives the batch as it is.
        """
        return self._loop.micro_batches(batch)

    def backward(self, loss: Tensor, *, summed: bool = False, scaler: GradScaler | None = None, of: Any = None) -> None:
        """In place of `loss.backward()`: weighted so that the gradients, behind the last micro batch, are those of the
        mean over the global batch.

        The loss is the mean over what counts in this rank's batch or micro batch: samples, or the result of the
        loader's `count`. With `summed` it is a sum over its samples, and the gradients are those of the sum over the
        global batch, as plain torch gives it. A `scaler` scales the backward pass, not the loss that
        is recorded. `of`: where there are two training loaders, the batch that the loss comes from, or a tensor of it;
        None: all that the loop has taken, whose shares on the ranks have to be in proportion.
        """
        self._loop.backward(loss, summed=summed, scaler=scaler, of=of)

    def train_step(
        self,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        *,
        summed: bool = False,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """One pass over a batch: `rt.backward(loss_of(micro_batch))` for each micro batch.

        Returns this rank's losses, detached, one per micro batch: (micro batches,). The optimizer's step follows it.
        """
        losses = []
        for micro_batch in self.micro_batches(batch):
            loss = loss_of(micro_batch)
            self.backward(loss, summed=summed, scaler=scaler)
            losses.append(loss.detach())
        return stack(losses)

    def mean(self, loss: Tensor | float, *, of: Any = None) -> float:
        """The mean over the global batch of a number that is a mean over this rank's batch, such as its loss: the same
        on every rank, in float64. For what decides in the loop: line search, plateau, early stop. Of several micro
        batches: the losses that `train_step` returned. `of`: as in `backward`.

        A collective: call it on every rank. It waits for the device.
        """
        self._check_open("rt.mean")
        return self._loop.mean(loss, of)

    # ---- what is saved

    @property
    def steps(self) -> int:
        """Optimizer steps since the start of the run, over all attempts.

        In the loop over the loader: of the batches before this one, also after its `optimizer.step()`.
        """
        return self._loop.steps

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one or nothing is tracked or there is no run folder.

        Inside the loop over the loader it is written when the step is over; after it, and in an epoch's last step, when
        the body of the loop over the epochs is: a resumed run continues after it.
        """
        if not (self._loop.inside or self._loop.in_tail) and self._loop.open_epoch is None:
            self._agree("called rt.save()")
            self._save_now()
        else:
            self._ask(SAVE, "rt.save()")

    def _ask(self, request: str, reason: str) -> None:
        """Of all ranks: one that is alone gets it at once."""
        check_kind(
            reason, str, f"rt.{'stop' if request == STOP else 'finish_early'}({{}})", "reason", '"the loss is small"'
        )
        self._agreement.ask(request, reason)
        if self.group.world_size == 1:
            self._agree("asked")

    def _ask_to_save(self) -> None:
        """Rank 0 asks for a save, for its time has come."""
        self._agreement.ask(SAVE, "save_every", alone=self.group.world_size > 1)
        if self.group.world_size == 1:
            self._agree("asked")

    def _agree(self, point: str, mine: Any = None) -> list[Any]:
        """A collective, which grants what any rank has asked for; returns what each rank has as `mine`.

        RequestError, on every rank, if other ranks call it at another point of the script.
        """
        if self._loop_was_left:
            how = f"an exception {self._broken_off}" if self._broken_off else "break or return"
            point = f"left the loop over rt.epochs() by {how}"
            self._loop_was_left = False
        granted, answers = self._agreement.agree(point, mine)
        self._saves.note_stop(granted.get(STOP))
        self._finish_reason = self._finish_reason or granted.get(FINISH)
        self._save_asked |= SAVE in granted
        return answers

    def _save_now(self) -> None:
        self._save_asked = False
        if self._checkpointer.is_due(self.steps):
            stop = self._loop.record.catch_up(self._need_loader().weighing)
            self._saves.note_stop(stop)
            self._check_state()
            self._average_buffers()
            places = [second.place for second in self._loop.seconds]
            position = describe_position(self.steps, self._need_loader().sampler, places)
            self._checkpointer.save(position, {"plan": self.plan._asdict()})
        self._checkpointer.name_best()

    def _check_state(self, *, at_end: bool = False) -> None:
        """RequestError, on every rank, for a state that is not worth a checkpoint."""
        self._same.check(self.steps, at_end=at_end)
        loss, skipped = self._loop.record.loss, self._loop.skipped_step
        if (
            loss is not None
            and not math.isfinite(loss)
            and not any(scaler.is_enabled() for scaler in self._loop.scalers)
            and skipped != self.steps
        ):
            raise RequestError(
                f"the loss of the run is {loss} by step {self.steps}. No checkpoint is written of that",
                "continue from the checkpoint before with a smaller learning rate, or bound each step:"
                " torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            )

    def _agree_after_break(self) -> None:
        """Before any collective behind a loop that was left: the other ranks may be in it still."""
        if self._loop_was_left:
            self._agree("left the loop")

    def save_best(self, value: float | Tensor, mode: str = "max") -> bool:
        """Keep a checkpoint of this step, beside the newest ones, if `value` is the largest of the run so far.

        With `mode` "min": the smallest. Rank 0's value counts, NaN never. Where only rank 0 knows it, the others give
        NaN, an infinity or 0; any other value than rank 0's is an error. Returns, on every rank, whether it was the
        best one. A resumed run knows the best value of the attempts before. Call it after the loop over the loader; the
        checkpoint is written at the end of the loop's body.
        """
        if self._loop.is_left:
            self._end_steps()
        if self._loop.inside and (self._last_step is None or not self._loop.stepped):
            where = "the loop over the loader" if self._last_step is None else "a step, before optimizer.step()"
            raise RequestError(
                f"rt.save_best(value) came inside {where}",
                "call it after the loop, once per epoch; or in a loop over rt.batches(…), after optimizer.step()",
            )
        number = read_value(value, "rt.save_best({})")
        mine = self._checkpointer.is_best(number, mode), number
        answers = self._agree("called rt.save_best(value)", mine)
        check_same_value([value for _, value in answers])
        if answers[0][1] != answers[0][1]:
            print_warning(
                "rt.save_best(value) got NaN on rank 0: that is never the best, and no checkpoint is kept",
                is_first=self.is_main,
            )
        is_best = bool(answers[0][0])
        if is_best:
            self._checkpointer.propose_best(number, mode, self._loop.steps_made)
            self.save()
        return is_best

    def save_model(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write the whole weights of a model (None: the only one) to a file that `torch.load` reads anywhere.

        Rank 0 writes it, as a whole. Of an AveragedModel the averaged weights are written, under the model's own names.
        """
        self._check_open("rt.save_model")
        file = read_path(path, "rt.save_model({})")
        if model is None:
            if len(self._models) != 1:
                raise RequestError(
                    f"rt.save_model(path) does not know which of {len(self._models)} models",
                    "rt.save_model(path, model)",
                )
            [model] = self._models.values()
        check_kind(model, nn.Module, "rt.save_model(path, {})", "model", "model")
        self._agree("called rt.save_model(path)")
        self._average_buffers()
        if isinstance(model, AveragedModel):
            model = model.module
        write_whole(unwrap(model), file, self.group)
