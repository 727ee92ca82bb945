"""The steps at which all ranks save, stop or finish early.

A rank requests it by a flag in the step's sums. If all ranks request it at one step, it happens at this step; otherwise
at the next one, where all of them know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.state import AT_ITS_END
from hpcddp.training.checkpoint.checkpointer import AttemptSaves, Checkpointer, check_same_value
from hpcddp.training.data.sampler import MicroBatch, describe_position
from hpcddp.training.objects import Models, TrainingData
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.sameness import CHECKED_FIRST
from hpcddp.training.report import Report
from hpcddp.training.steps import Agreement, StepRecord
from hpcddp.training.stopping import DEADLINE, FINISH, SAVE, STOP, STOP_FLAGS, StopTraining, StopWatch


class Saves:
    """Counts the steps of the run; saves and stops where it is time. Its methods are called on every rank alike."""

    def __init__(
        self,
        setup: RunSetup,
        watch: StopWatch,
        agreement: Agreement,
        record: StepRecord,
        report: Report,
        models: Models,
        data: TrainingData,
    ) -> None:
        options, group = setup.options, setup.group
        self.steps = 0  # optimizer steps since the start of the run, over all attempts, of batches that are over
        self.open_epoch: int | None = None  # the epoch that the loop over rt.epochs or rt.batches is in, or was left in
        self.last_step: int | None = None  # of the loop over rt.batches that is open
        self.in_tail = False  # whether the epoch's last step was made, and its body has not ended
        self.is_finished = bool(setup.over)  # whether no step is left of the run
        self.finish_reason = None if setup.over in {"", AT_ITS_END} else setup.over  # it finished early
        self.counts = dict(setup.counts or {})  # epochs or steps that the run was asked for
        self.is_over = False  # whether the `with` body has ended
        self.has_left_epochs = False  # whether a loop over rt.epochs was left, since the ranks have agreed last
        self.agreement = agreement
        self.attempt = AttemptSaves(setup.folder, watch, is_first=group.is_first, every_s=options.save_s)
        self.checkpointer = Checkpointer(setup, self.attempt)
        self.pace = watch.pace
        self.record, self.report, self.models, self.data, self._watch = record, report, models, data, watch
        self._several = group.world_size > 1
        self._every, self._at_epoch_ends = options.save_every.steps, options.saves_at_epoch_ends
        self._save_due = False  # whether a save is to come at the next place for one
        self._is_behind_batches = False  # in a tail, whose step is only counted now

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops here, to be resumed by a later attempt; set on all ranks at the same step."""
        return self.attempt.stop_reason

    @property
    def is_ending(self) -> bool:
        """Whether the loop ends after this step."""
        return self.attempt.stop_reason is not None or self.finish_reason is not None or self.is_finished

    def ask(self, request: str, reason: str) -> None:
        """Ask all ranks for one of REQUESTS; a single rank gets it at once. The first reason stays."""
        self.agreement.requests.setdefault(request, reason)
        if not self._several:
            self.agree("asked")

    def agree(self, place: str, mine: Any = None) -> list[Any]:
        """A collective, which grants what any rank has asked for; returns what each rank has as `mine`.

        RequestError, on every rank, if other ranks call it at another place of the script.
        """
        if self.has_left_epochs:
            place, self.has_left_epochs = "left the loop over rt.epochs()", False
        granted, answers = self.agreement.agree(place, mine)
        self.attempt.accept_stop(granted.get(STOP))
        self.finish_reason = self.finish_reason or granted.get(FINISH)
        self._save_due |= SAVE in granted
        return answers

    def check_together(self, call: str) -> None:
        """Check that all ranks come to a collective of the script's own, behind the `with` body or behind a loop that
        was left, in which others may still be. RequestError."""
        self.check_open(call)
        if self.has_left_epochs:
            self.agree("left the loop")

    def agree_to_go_on(self, place: str, steps: int, *, tail: bool = False) -> bool:
        """A collective: stop here if a rank has no time for so many more steps, or another reason. Returns whether the
        tail of an epoch takes long, or an unknown time.

        An attempt makes a step before it looks at the time, so that a chain of them comes to its end.
        """
        flags = self._watch.flags(steps, tail=tail)
        if not self.pace.steps:
            flags = tuple(flag for flag in flags if flag != DEADLINE)
        answers = self.agree(place, (flags, self.pace.tail_is_long))
        raised = {flag for flags, _ in answers for flag in flags}
        self.attempt.accept_stop(next((flag for flag in STOP_FLAGS if flag in raised), None))
        return bool(answers[0][1])

    def check_open(self, call: str) -> None:
        """RequestError behind the `with` body: of several ranks each would have its own part only."""
        if self.is_over and self._several:
            raise RequestError(
                f"{call} came after the `with` body of hpcddp.runtime, when the ranks had parted",
                f"with hpcddp.runtime(…) as rt: …, with {call} at the end of the body",
            )

    def leave_if_stopping(self) -> None:
        """StopTraining takes the script out of the `with` body."""
        if self.stop_reason is not None:
            raise StopTraining

    def open_again(self, unit: str, count: int) -> None:
        """A finished run goes on if more epochs or steps are asked for than it was finished with."""
        before = self.counts.get(unit)
        if self.is_finished and before is not None and count > before:
            self.is_finished, self.finish_reason = False, None
        self.counts = {unit: max(count, before or 0)}
        self.in_tail = False

    def in_tail_of_last(self, end: Callable[[], object]) -> None:
        """End, in the tail of an epoch, the step in which the loop left its batches by `break`."""
        self._is_behind_batches = True
        end()
        self._is_behind_batches = False

    # ---- in the loop over the batches

    def loop_starts(self) -> None:
        """A loop over the loader begins, perhaps over the rest of an epoch."""
        if self.open_epoch is None:
            self.checkpointer.begin_training(is_finished=self.is_finished)
        self.in_tail = False
        if self._save_due:
            self.save_now()
        self.leave_if_stopping()

    def comes_to_step(self, micro: MicroBatch) -> None:
        """Stop before an epoch's last step if there is no time for that and for what follows it, such as an evaluation,
        which nothing interrupts; and save if that may be long."""
        is_last = micro.ends_epoch if self.last_step is None else self.steps + 1 == self.last_step
        if is_last and not self.data.may_end_with_second:
            of = "the loop" if self.last_step is not None else f"epoch {self.data.epoch + 1}"
            is_long = self.agree_to_go_on(f"came to the last step of {of}", 1, tail=True)
            if self.pace.steps and (is_long or self._save_due or self.stop_reason is not None):
                self.save_now()
            self.leave_if_stopping()
        self.in_tail = False

    def count_step(self, micro: MicroBatch) -> None:
        """A global batch is over: count it as a step, exchange flags, save or stop if it is time.

        After an epoch's last step all of that waits for the end of the body.
        """
        data, record, pace = self.data, self.record, self.pace
        self.steps = step = self.steps + 1
        loader, attempt, agreement = data.first, self.attempt, self.agreement
        assert loader is not None
        epoch = loader.sampler.epoch
        ends = micro.ends_epoch if self.last_step is None else step == self.last_step
        is_last = ends or self._is_behind_batches or bool(data.seconds and data.may_end_with_second)
        loader.sampler.advance(micro)
        pace.step_ended(in_tail=self._is_behind_batches)
        more = loader.weighing.list_numbers()
        lr = self.checkpointer.learning_rate() if record.is_written else None
        if attempt.timer is not None and attempt.timer.is_due:
            if self._several:  # no other rank asks at this step
                agreement.requests.setdefault(SAVE, "save_every")
            self._save_due |= not self._several
        flags = (() if is_last else self._watch.flags()) + tuple(agreement.requests)
        reason = record.end_step(micro.total, flags, more, step=step, epoch=epoch, lr=lr)
        if reason is not None:
            attempt.accept_stop(reason)
        self.report.step(step, micro.total, record.loss)
        if self._several and not is_last:  # one rank alone has agreed when it asked
            is_due = agreement.requested or (agreement.requests and record.all_request())
            if is_due:  # the same on every rank
                self.agree(f"ended step {step}")
        if pace.steps <= CHECKED_FIRST:
            self.models.same.compare(step)
        if self._every is not None and step % self._every == 0:
            self._save_due = True
        self.in_tail = is_last or (self.finish_reason is not None and attempt.stop_reason is None)
        if self.in_tail:
            return
        if self._save_due or attempt.stop_reason is not None:
            self.save_now()
        if self.checkpointer.may_write_async:
            self.checkpointer.poll(wait=self.is_ending)
        if attempt.stop_reason is not None:
            raise StopTraining

    # ---- saving

    @property
    def is_due_at_end(self) -> bool:
        """Whether a checkpoint is to be written at the end of a loop's body."""
        return self._at_epoch_ends or self._save_due

    def save(self, *, inside: bool) -> None:
        """See `Runtime.save`. `inside` a step, and in an epoch's tail, it waits for the end of that."""
        if inside or self.in_tail or self.open_epoch is not None:
            self.ask(SAVE, "rt.save()")
        else:
            self.agree("called rt.save()")
            self.save_now()

    def save_now(self) -> None:
        """Write a checkpoint of this step, if there is none."""
        self._save_due = False
        if self.checkpointer.is_due(self.steps):
            loader = self.data.loader
            self.attempt.accept_stop(self.record.catch_up())
            self.models.same.check(self.steps)
            self.models.average_buffers()
            position = describe_position(self.steps, loader.sampler, [second.place for second in self.data.seconds])
            assert self.data.plan is not None
            self.checkpointer.save(position, {"plan": self.data.plan._asdict()})
        self.checkpointer.name_best()

    def save_best(self, value: float, mode: str, step: int, *, inside: bool) -> bool:
        """See `Runtime.save_best`. `step`: the one whose weights the value is of; `inside`: it is not over."""
        answers = self.agree("called rt.save_best(value)", (self.checkpointer.is_best(value, mode), value))
        check_same_value([theirs for _, theirs in answers])
        is_best = bool(answers[0][0])
        if is_best:
            self.checkpointer.propose_best(value, mode, step)
            self.save(inside=inside)
        return is_best
