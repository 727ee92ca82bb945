"""Where a training is in its data: as a checkpoint holds it, and back."""

from __future__ import annotations

from collections.abc import Sequence

from hpcddp.errors import RequestError
from hpcddp.training.data.items import ItemSampler
from hpcddp.training.data.sampler import GlobalBatchSampler
from hpcddp.training.data.stream import StreamSampler
from hpcddp.units import format_count

Sampler = GlobalBatchSampler | StreamSampler | ItemSampler


def describe_position(step: int, sampler: Sampler, places: Sequence[tuple[int, int]] = ()) -> dict[str, int]:
    """The position after `step` optimizer steps: the epoch, and how many of its samples are consumed. `places`: pass
    and position of the second loader and further ones."""
    found = {"step": step, "epoch": sampler.epoch, "position": sampler.position}
    for number, (epoch, position) in enumerate(places, 2):
        found |= {f"pass_{number}": epoch, f"position_{number}": position}
    return found


def find_place(position: dict[str, int], number: int, length: int | None, *, again: bool) -> tuple[int, int]:
    """Where the loop over this loader, the second or a further one, continues: pass and position. `again`: at the start
    of its pass."""
    epoch, taken = position.get(f"pass_{number}", 0), position.get(f"position_{number}", 0)
    if again:
        return epoch, 0
    return (epoch + 1, 0) if length is not None and taken >= length else (epoch, taken)


def move_to(position: dict[str, int], sampler: Sampler, *, again: bool) -> None:
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
