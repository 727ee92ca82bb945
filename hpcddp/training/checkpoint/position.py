"""Where a training is in its data: as a checkpoint holds it, and back."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.stream_sampler import StreamSampler


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
    return position | ({"samples": sampler.length} if sampler.length is not None else {})


def move_to(position: dict[str, int], sampler: GlobalBatchSampler | StreamSampler) -> None:
    """Continue at this position. RequestError if another seed or another data set gave the samples of its epoch."""
    check_position(position, seed=sampler.seed, length=sampler.length)
    sampler.consumed = position["consumed"]


def check_position(position: dict[str, int], *, seed: int, length: int | None) -> None:
    """RequestError if another seed or a data set of another length gave the samples of a checkpoint's epoch."""
    samples = position.get("samples", length)
    if samples != length:
        raise RequestError(
            f"the data set has {length} samples, the checkpoint's run had {samples}",
            "resume with the same data, or begin a new run: --fresh",
        )
    if position.get("seed", seed) != seed and (length is None or position["consumed"] % length):
        raise RequestError(
            f"seed {seed} orders the rest of this epoch differently from the checkpoint's seed {position['seed']}",
            f"seed={position['seed']} (--seed {position['seed']}), or another run folder",
        )
