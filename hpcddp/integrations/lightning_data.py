"""Where Lightning is in its training data: it counts the batches of a resumed epoch, but reads them from the start."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcddp.training.torch_compat import drop_iterator


def count_global_batch(trainer: Any) -> int | None:
    """Samples per optimizer step over all ranks; None where the loader does not say."""
    sizes = {getattr(loader, "batch_size", None) for loader in _loaders(trainer)}
    size = sizes.pop() if len(sizes) == 1 else None
    return None if size is None else size * trainer.accumulate_grad_batches * trainer.world_size


def find_loss(logged: Mapping[str, Any]) -> float | None:
    """The training's loss among what the module has logged, by its name; None if it is not clear which that is."""
    names = [name for name in logged if "loss" in name and not re.match("(val|test|eval|predict)", name)]
    steps = [name for name in names if not name.endswith("_epoch")]
    return float(logged[steps[0]]) if len({name.removesuffix("_step") for name in steps}) == 1 else None


def skip_batches(trainer: Any, restore: Callable[[], object]) -> str | None:
    """Go on in the resumed epoch at its next batch; returns a line to say where that cannot be.

    The loaders were iterated already, and of another epoch if the last one had just ended. `restore` sets the random
    state of the save: to iterate over a loader draws a number, which inside an epoch was drawn before that.
    """
    fit_loop = trainer.fit_loop
    if any(hasattr(loader, "load_state_dict") for loader in _loaders(trainer)):  # it goes on by itself
        restore()
        return None
    done = fit_loop.epoch_loop.batch_progress.current.ready
    if done >= trainer.num_training_batches:
        done = 0
    cannot = []
    for loader in _loaders(trainer):
        for sampler in (getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(trainer.current_epoch)
        if done and getattr(loader, "batch_sampler", None) is None:
            cannot.append(
                f"a {type(loader.dataset).__name__} is read from its start: its data begin again in the epoch"
            )
        elif done:
            # to begin again draws a number: where that is due next, all of the loader is skipped
            skipped = (done - 1) % len(loader) + 1 if _begins_again(trainer) else done
            # a DataLoader lets nobody set this, because its workers have it already: they are made anew
            object.__setattr__(loader, "batch_sampler", RestOfEpoch(loader.batch_sampler, skipped))
            drop_iterator(loader)
        if done and not _is_same_again(loader):
            name = type(loader.sampler).__name__
            cannot.append(f"the order of {name} is drawn anew: DistributedSampler repeats it")
    if not done:
        restore()
    iter(fit_loop._data_fetcher)
    if done:
        restore()
    return f"warning: resumed inside an epoch, and {'; '.join(cannot)}" if cannot else None


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


def _begins_again(trainer: Any) -> bool:
    """Whether a shorter one of several loaders is read again within the epoch."""
    return getattr(trainer.fit_loop._combined_loader, "_mode", None) == "max_size_cycle"


def _is_same_again(loader: Any) -> bool:
    sampler = getattr(loader, "sampler", None)
    return hasattr(sampler, "set_epoch") or type(sampler).__name__ == "SequentialSampler"
