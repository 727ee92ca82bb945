"""Lightning's Trainer in a run: it saves into the run folder, and goes on inside an epoch at the next batch."""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from hpcddp.integrations.ranks import check_all_ranks, join_ranks
from hpcddp.integrations.run import Run, ended
from hpcddp.integrations.saved import FrameworkCheckpoint, check_world, find_saved
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.arguments import SaveEvery
from hpcddp.training.data.randomness import States, read_states, restore
from hpcddp.training.options import DEFAULT_SAVE_S
from hpcddp.training.stopping import STOP_SIGNALS, SignalFlag, StopTraining
from hpcddp.training.torch_compat import drop_iterator
from hpcddp.uncaught import two_lines

FRAMEWORK = "Lightning's Trainer"
_FILE = "lightning.ckpt"


def attach(trainer: Any, attempt: AttemptFolder, env: MutableMapping[str, str], every: SaveEvery) -> None:
    """See `hpcddp.integrations.attach`."""
    hint = "leave out devices= and num_nodes=: hpcddp exec says them to Lightning"
    check_all_ranks(env, "the trainer", trainer.world_size, hint)
    package = next(kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    base = import_module(f"{package.partition('.trainer')[0]}.callbacks").Callback

    def resuming(fit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fit)
        def fit_in_run(*given: Any, **named: Any) -> Any:
            arguments = inspect.signature(fit).bind(*given, **named)
            with two_lines():
                saved = find_saved(attempt.run, FRAMEWORK)
            if saved is not None:  # also in place of the script's own: the run has come further
                arguments.arguments["ckpt_path"] = f"{saved.path}/{_FILE}"
                arguments.arguments.setdefault("weights_only", False)  # the run wrote it: no stranger's file
            signals = SignalFlag()
            with signals.installed():
                hooks = type("HpcddpCallback", (LightningHooks, base), {})(env, attempt, saved, signals, every)
                trainer.callbacks.append(hooks)
                try:
                    with hooks.until_end:
                        result = fit(*arguments.args, **arguments.kwargs)
                finally:
                    trainer.callbacks.remove(hooks)
                if hooks.run is not None and hooks.run.stop_reason:
                    raise SystemExit(0)  # what follows is for a model whose training is finished
                return result

        return fit_in_run

    trainer.fit = resuming(trainer.fit)


class LightningHooks:
    """The events of Lightning's Trainer that matter to a run."""

    def __init__(
        self,
        env: MutableMapping[str, str],
        attempt: AttemptFolder,
        saved: FrameworkCheckpoint | None,
        signals: SignalFlag,
        save_every: SaveEvery,
    ) -> None:
        self._env, self._attempt, self._saved = env, attempt, saved
        self._signals = signals
        self._saves_at_epoch_ends = save_every == SaveEvery()
        self._save_every_in_epoch = SaveEvery(seconds=DEFAULT_SAVE_S) if self._saves_at_epoch_ends else save_every
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self.run: Run | None = None  # from `setup` on: `fit` makes the process group
        self.until_end = ExitStack()  # of `fit`

    def setup(self, trainer: Any, _module: Any, stage: str) -> None:
        """The process group is there."""
        if self.run is not None or stage != "fit":
            return
        ranks = join_ranks(self._env, "trainer.fit()")
        with two_lines():
            if self._saved is not None and type(trainer.strategy).__name__.startswith("DeepSpeed"):
                check_world(self._saved, ranks.world_size, None, fixed="DeepSpeed's optimizer is saved per rank")
        self.run = Run(
            FRAMEWORK, self._attempt, ranks, self._env, self._signals, self._saved, save_every=self._save_every_in_epoch
        )
        self.until_end.enter_context(ended(self.run))
        with two_lines():
            self.run.open()

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """All is loaded, and no batch was read. Lightning's handlers of signals, which communicate or requeue the job,
        give way to those of before."""
        run = self._opened()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        run.global_batch = count_global_batch(trainer)
        seed = self._env.get("PL_GLOBAL_SEED", "")  # of Lightning's seed_everything
        with two_lines():
            run.compare_settings(global_batch=run.global_batch, seed=int(seed) if seed.isdecimal() else None)
        if 0 < trainer.estimated_stepping_batches < float("inf"):
            run.expect_steps(int(trainer.estimated_stepping_batches))
        if self._saved is None:
            return
        with two_lines():
            line = check_world(self._saved, run.ranks.world_size, run.global_batch)
        state = name_random_state(Path(self._saved.path), run.ranks.rank)
        for text in (line, skip_batches(trainer, lambda: restore_random_state(state))):
            if text:
                run.print_line(text)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Agree with all ranks, after an optimizer step, whether to stop."""
        run = self._opened()
        if trainer.global_step == run.step:  # the gradients of this batch are only added up
            return
        stops = run.count_step(trainer.global_step, trainer.current_epoch)
        if trainer.global_step % max(trainer.log_every_n_steps, 1) == 0:
            loss = trainer.callback_metrics.get("train_loss")  # on every rank: it may have to be added up
            if loss is not None:
                run.record_loss(float(loss))
        if stops and _is_last_step(trainer):
            run.forget_stop()
        elif stops:
            self._save(trainer)
            raise StopTraining  # Lightning's own way to stop ends the epoch, with all that it does then
        elif run.is_save_due:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """A checkpoint at the end of each epoch, unless `save_every` says how often."""
        if self._saves_at_epoch_ends:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        run = self._opened()
        with run.saving(run.step, trainer.current_epoch) as folder:
            trainer.save_checkpoint(folder / _FILE)
            torch.save(tuple(read_states()), name_random_state(folder, run.ranks.rank))

    def _opened(self) -> Run:
        if self.run is None:
            raise RuntimeError("Lightning has not called `setup`")
        return self.run


def _is_last_step(trainer: Any) -> bool:
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    is_last_epoch = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return bool(is_last_epoch and trainer.is_last_batch)


# ---- the place in the training data


def count_global_batch(trainer: Any) -> int | None:
    """Samples per optimizer step over all ranks; None where the loader does not say."""
    sizes = {getattr(loader, "batch_size", None) for loader in _loaders(trainer)}
    size = sizes.pop() if len(sizes) == 1 else None
    return None if size is None else size * trainer.accumulate_grad_batches * trainer.world_size


def skip_batches(trainer: Any, restore: Callable[[], object]) -> str | None:
    """Continue the resumed epoch at its next batch; returns a line to print where that cannot be. Lightning counts the
    batches of a resumed epoch, and reads them from the start.

    The loaders were iterated already, and of another epoch if the last one had just ended. `restore` sets the random
    state of the save: to iterate over a loader draws a number, which inside an epoch was drawn before that.
    """
    fit_loop, loaders = trainer.fit_loop, _loaders(trainer)
    if any(hasattr(loader, "load_state_dict") for loader in loaders):  # Lightning has restored its position
        restore()
        return None
    done = fit_loop.epoch_loop.batch_progress.current.ready
    if done >= trainer.num_training_batches:
        done = 0
    for loader in loaders:
        for sampler in (getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(trainer.current_epoch)
        if done and loader.batch_sampler is not None:
            # a DataLoader lets nobody set this, because its workers have it already: they are made anew
            object.__setattr__(loader, "batch_sampler", RestOfEpoch(loader.batch_sampler, done))
            drop_iterator(loader)
    if not done:
        restore()
    iter(fit_loop._data_fetcher)
    if done:
        restore()
    if not done or all(map(_is_repeatable, loaders)):
        return None
    return (
        "warning: resumed inside an epoch, in another order of the data than before: a DistributedSampler repeats its"
        " order, a stream and other samplers do not"
    )


def _is_repeatable(loader: Any) -> bool:
    """Whether the loader gives the samples of an epoch in the same order again."""
    sampler = getattr(loader, "sampler", None)
    repeats = hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler)
    return loader.batch_sampler is not None and repeats


class RestOfEpoch:
    """A batch sampler without the first `done` batches of its first epoch."""

    def __init__(self, whole: Any, done: int) -> None:
        self._whole = whole
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0
        return itertools.islice(iter(self._whole), done, None)

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _loaders(trainer: Any) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def name_random_state(folder: Path, rank: int) -> Path:
    """The path of a rank's random state, which Lightning does not save."""
    return folder / f"random-{rank:04d}.pt"


def restore_random_state(path: Path) -> None:
    """Restore it; do nothing where there is none for this rank, as the run was on fewer ranks before."""
    if path.is_file():
        restore(States(*torch.load(path, weights_only=False)))  # the run wrote it
