"""The Trainer of transformers in a run: its own checkpoints count once every rank has written."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.integrations.ranks import check_all_ranks
from hpcddp.integrations.run import Run, opened
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.arguments import SaveEvery

FRAMEWORK = "the Trainer of transformers"
_MOST_NOTES = 1000  # on checkpoints, whose files the Trainer itself removes (save_total_limit)


def attach(trainer: Any, attempt: AttemptFolder, env: MutableMapping[str, str], every: SaveEvery) -> None:
    """See `hpcddp.integrations.attach`."""
    args = trainer.args
    base = import_module("transformers").TrainerCallback
    if every.steps is not None:
        raise RequestError(
            f"the Trainer of transformers counts steps as its arguments say, not by attach(…, save_every={every})",
            f'TrainingArguments(…, save_strategy="steps", save_steps={every})',
        )
    hint = "on CPUs: export ACCELERATE_USE_CPU=true; else leave out what limits it"
    check_all_ranks(env, "the trainer", args.world_size, hint)
    _check_arguments(args)

    def resuming(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def train_in_run(resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
            batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            with opened(
                FRAMEWORK,
                attempt,
                env,
                "trainer.train()",
                global_batch=batch,
                keep=_MOST_NOTES,
                save_every=every,
                fixed="DeepSpeed's optimizer is saved per rank" if args.deepspeed else "",
                seed=args.seed,
                samples=len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
            ) as run:
                callback = type("HpcddpCallback", (TransformersHooks, base), {})(run)
                trainer.add_callback(callback)
                try:
                    return train(run.saved.path if run.saved else resume_from_checkpoint, *more, **named)
                finally:
                    trainer.remove_callback(callback)

        return train_in_run

    trainer.train = resuming(trainer.train)


def _check_arguments(args: Any) -> None:
    """RequestError for arguments with which a checkpoint cannot be resumed, or would not be there."""
    if args.save_only_model:
        raise RequestError(
            "TrainingArguments(save_only_model=True) saves no optimizer: nothing can be resumed from that",
            "leave out save_only_model",
        )
    if args.save_total_limit == 1:  # the old one would be removed before the new one is known to be complete
        args.save_total_limit = 2


class TransformersHooks:
    """The events of the Trainer that matter to a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_begin(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The number of steps is known."""
        if state.max_steps > 0:
            self._run.expect_steps(state.max_steps)
        return control

    def on_log(self, _args: Any, _state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
        """The Trainer has the mean loss since its last log, over all ranks."""
        loss, lr = ((logs or {}).get(name) for name in ("loss", "learning_rate"))
        if isinstance(loss, (int, float)):
            self._run.record_loss(loss, lr if isinstance(lr, (int, float)) else None)
        return control

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        """An optimizer step was made: the ranks agree whether to stop."""
        stops = self._run.count_step(state.global_step, int(state.epoch or 0))
        if stops and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # no time is left for it; with save_strategy="best" it would decide
        elif self._run.is_save_due:
            control.should_save = True
        return self.on_epoch_end(None, None, control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
        """A save may follow."""
        if control.should_save:
            self._run.save_began()
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Record that this rank has saved."""
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        self._run.framework_saved(path, state.global_step, int(state.epoch or 0))
        return control

    def on_train_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Drop a request to stop if the last step was made."""
        if state.global_step >= state.max_steps:
            self._run.forget_stop()
        return control
