"""Whether a checkpoint that a framework wrote can be resumed on another number of ranks."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.integrations.saved import Saved
from hpcddp.units import format_count


def check_world(saved: Saved, world_size: int, global_batch: int | None, *, fixed: str = "") -> str | None:
    """A line to say before the training; None if nothing is to be said. RequestError if the resume would be wrong.

    Frameworks count steps and batches per rank: their place in the data, and the learning rate's, are right only as
    long as a step has as many samples as before. `fixed`: why this checkpoint fits no other number of ranks at all.
    """
    before, now = format_count(saved.world_size, "rank"), format_count(world_size, "rank")
    hint = f"resume on {before} with the same batch, or begin a new run: --fresh"
    if saved.world_size != world_size and fixed:
        raise RequestError(f"the checkpoint of step {saved.step} is of {before}, and here are {now}: {fixed}", hint)
    if saved.world_size == world_size:
        return None
    if global_batch is None or saved.global_batch is None:
        raise RequestError(
            f"the checkpoint of step {saved.step} is of {before}, and here are {now}: the loop counts batches per rank,"
            " and would repeat or leave out samples",
            hint,
        )
    if global_batch != saved.global_batch:  # which was accepted
        return None
    return (
        f"warning: resumed from step {saved.step} of {before} on {now}: as many samples per step, but the rest of the"
        " epoch has them in another order, and other random numbers"
    )
