"""Where a training is in its data: as a checkpoint holds it, and back."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.stream import StreamSampler
from hpcddp.training.setup import ANEW


def describe_position(
    step: int, sampler: GlobalBatchSampler | StreamSampler, open_epoch: int | None = None
) -> dict[str, int]:
    """The position after `step` optimizer steps. `open_epoch`: the one that the loop is in.

    If all its samples are consumed, what the loop does after them, such as evaluation and the scheduler's step, is
    still to come.
    """
    position = {"step": step, "epoch": sampler.epoch, "consumed": sampler.consumed, "seed": sampler.seed}
    if open_epoch is not None:
        position["open_epoch"] = open_epoch
    if isinstance(sampler, GlobalBatchSampler):
        position |= {"samples": sampler.length, "of_samples": sampler.samples, "shuffle": sampler.shuffle}
    return position


def move_to(position: dict[str, int], sampler: GlobalBatchSampler | StreamSampler, anew: str) -> None:
    """Continue at this position. RequestError if another seed, another data set or another `shuffle` gave the samples
    of its epoch.
    """
    if not isinstance(sampler, GlobalBatchSampler):
        check_position(position, seed=sampler.seed, length=sampler.length, samples=sampler.length, anew=anew)
        sampler.consumed = position["consumed"]
        return
    seed, length, samples = sampler.seed, sampler.length, sampler.samples
    check_position(position, seed=seed, length=length, samples=samples, shuffle=sampler.shuffle, anew=anew)
    epoch, taken = divmod(position["consumed"], position.get("samples", length))
    sampler.consumed = epoch * length + min(taken, length)


def check_position(
    position: dict[str, int],
    *,
    seed: int,
    length: int | None,
    samples: int | None,
    shuffle: bool | None = None,
    anew: str = ANEW,
) -> None:
    """RequestError if another seed, a data set of another length or another `shuffle` gave the samples of a
    checkpoint's epoch. With drop_last an epoch has only `length` of the data set's `samples`, by the global batch. A
    stream's checkpoint says neither of them, nor `shuffle`.
    """
    old_length, old = position.get("samples", length), position.get("of_samples", samples)
    if old != samples:
        raise RequestError(
            f"the data set has {samples} samples, the checkpoint's run had {old}",
            f"resume with the same data, or {anew}",
        )
    if old_length is not None and position["consumed"] % old_length == 0:
        return
    if position.get("seed", seed) != seed:
        raise RequestError(
            f"seed {seed} orders the rest of this epoch differently from the checkpoint's seed {position['seed']}",
            f"hpcddp.runtime(…, seed={position['seed']}), or {anew}",
        )
    ordered = bool(position.get("shuffle", shuffle))
    if shuffle is not None and ordered != shuffle:
        raise RequestError(
            f"shuffle={shuffle} orders the rest of this epoch differently from the checkpoint's shuffle={ordered}",
            f"DataLoader(…, shuffle={ordered}), or {anew}",
        )
