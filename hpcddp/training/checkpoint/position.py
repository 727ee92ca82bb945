"""Where a training is in its data: as a checkpoint holds it, and back."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.stream import StreamSampler
from hpcddp.units import format_count


def describe_position(step: int, sampler: GlobalBatchSampler | StreamSampler) -> dict[str, int]:
    """The position after `step` optimizer steps: the epoch, and how many of its samples are consumed."""
    return {"step": step, "epoch": sampler.epoch, "position": sampler.position}


def move_to(position: dict[str, int], sampler: GlobalBatchSampler | StreamSampler, *, again: bool) -> None:
    """Continue at this position. `again`: at the start of its epoch, which has other samples now, or another order.

    RequestError if no batch of the epoch is left: with drop_last it has only `length` of the data set's samples, by the
    global batch.
    """
    taken = 0 if again else position["position"]
    if sampler.length is not None and taken >= sampler.length:
        raise RequestError(
            f"with drop_last=True and a global batch of {sampler.plan.global_batch} no batch is left of epoch"
            f" {position['epoch'] + 1}, of which the run has taken {format_count(taken, 'sample')}",
            "DataLoader(…, drop_last=False), or the global batch that the run had",
        )
    sampler.epoch, sampler.position = position["epoch"], taken
