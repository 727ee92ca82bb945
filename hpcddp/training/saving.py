"""What a run saves when the loop asks for it: checkpoints, the best one, and a model's weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.arguments import check_kind, read_path, read_value
from hpcddp.training.checkpoint.best import check_same_value
from hpcddp.training.checkpoint.position import describe_position
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.checkpoint.whole_model import write_whole
from hpcddp.training.prepare import Preparation
from hpcddp.training.remarks import print_warning
from hpcddp.training.stopping import FINISH, SAVE, STOP


class Saving(Preparation):
    """The part of a `Runtime` that writes files. Call its methods on every rank."""

    stop_reason: str | None = None  # is set on all ranks at the same step
    _save_asked = False
    _body_has_ended = False  # of the epoch that the loop is in
    _finish_reason: str | None = None
    _left: str | None = None  # the epoch of `epochs` that the loop is in
    _loop_was_left = False  # by `break` or `return`
    _broken_off: str | None = None  # where an exception left it

    @property
    def steps(self) -> int:
        """Optimizer steps since the start of the run, over all attempts.

        In the loop over the loader: of the global batches before this one, also after its `optimizer.step()`.
        """
        return self._loop.steps

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one or nothing is tracked or there is no run folder.

        Inside the loop over the loader it is written when the step is over, and after it, in the body of `rt.epochs`,
        when that is: a resumed run continues after it.
        """
        if not self._loop.inside and self._loop.open_epoch is None:
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

    def _ask_if_due(self) -> None:
        """Rank 0 asks for a save when its time has come."""
        timer = self._checkpointer.save_timer
        if timer is not None and timer.is_due:
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
        self.stop_reason = self.stop_reason or granted.get(STOP)
        self._finish_reason = self._finish_reason or granted.get(FINISH)
        self._save_asked |= SAVE in granted
        return answers

    def _save_now(self) -> None:
        self._save_asked = False
        if self._checkpointer.is_due(self.steps):
            stop = self._loop.record.catch_up(self._need_loader().weighing)
            self.stop_reason = self.stop_reason or stop
            self._check_state()
            self._average_buffers()
            position = describe_position(self.steps, self._need_loader().sampler, self._loop.open_epoch)
            facts = {"plan": self.plan._asdict()} | ({"data": self._facts.outline} if self._facts.outline else {})
            self._checkpointer.save(position, facts, self.stop_reason)
        self._checkpointer.name_best(self.stop_reason)

    def _check_state(self, *, at_end: bool = False) -> None:
        """RequestError, on every rank, for a state that is not worth a checkpoint."""
        self._same.check(self.steps, at_end=at_end)
        loss, skipped = self._loop.record.loss, self._loop.skipped_step
        if (
            loss is not None
            and not math.isfinite(loss)
            and not any(s.is_enabled() for s in self._loop.gate.scaled.scalers)
            and skipped != self.steps
        ):
            raise RequestError(
                f"the loss of the run is {loss} by step {self.steps}. No checkpoint is written of that",
                "continue from the checkpoint before with a smaller learning rate, or bound each step:"
                " rt.step(optimizer, clip_norm=1.0)",
            )

    def _agree_after_break(self) -> None:
        """Before any collective behind a loop that was left: the other ranks may be in it still."""
        if self._loop_was_left:
            self._agree("left the loop")

    def save_best(self, value: float | Tensor, mode: str = "max") -> bool:
        """Keep a checkpoint of this step, beside the newest ones, if `value` is the largest of the run so far.

        With `mode` "min": the smallest. Rank 0's value counts, NaN never. Where only rank 0 knows it, the others give
        NaN, an infinity or 0; any other value than rank 0's is an error. Returns, on every rank, whether it was the
        best one. A resumed run knows the best value of the attempts before. Call it after the loop over the loader.
        """
        if self._loop.inside:
            raise RequestError(
                "rt.save_best(value) came inside the loop over the loader", "call it after the loop, once per epoch"
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
            self._checkpointer.propose_best(number, mode, self.steps)
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
        staged = self._gradients.staged
        links = staged.links if staged is not None and unwrap(model) is staged.module else None
        write_whole(unwrap(model), file, self.group, links)
