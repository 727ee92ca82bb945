"""Where a training is in its data: as a checkpoint holds it, and back."""

from __future__ import annotations

from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.stream import StreamSampler


def describe_position(
    step: int, sampler: GlobalBatchSampler | StreamSampler, open_epoch: int | None = None
) -> dict[str, int]:
    """The position after `step` optimizer steps. `open_epoch`: the one that the loop is in.

    If all its samples are consumed, what the loop does after them, such as evaluation and the scheduler's step, is
    still to come.
    """
    position = {"step": step, "epoch": sampler.epoch, "consumed": sampler.consumed, "position": sampler.position}
    return position if open_epoch is None else position | {"open_epoch": open_epoch}


def move_to(position: dict[str, int], sampler: GlobalBatchSampler | StreamSampler, *, again: bool) -> None:
    """Continue at this position. `again`: at the start of its epoch, which has other samples now, or another order.

    With drop_last an epoch has only `length` of the data set's samples, by the global batch.
    """
    if isinstance(sampler, GlobalBatchSampler):
        taken = 0 if again else min(position["position"], sampler.length)
        sampler.consumed = position["epoch"] * sampler.length + taken
    else:
        sampler.consumed = position["consumed"] - (position["position"] if again else 0)
