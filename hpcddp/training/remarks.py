"""Warnings that rank 0 prints before a training loop starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from hpcddp.batchplan import BatchPlan

NOT_CAUGHT = (
    "this runtime is not in the main thread, where alone Python hears signals: SIGTERM and the warning before the"
    " walltime end the process without a checkpoint; the deadline is heard\nhint: open hpcddp.runtime in the main"
    " thread"
)


def describe_share(batch_size: int, ranks: int) -> str:
    """A warning that the `batch_size` of a DataLoader with a DistributedSampler is that of all ranks together."""
    return (
        f"batch_size={batch_size} of a DataLoader with a DistributedSampler is the global batch here, over all"
        f" {ranks} ranks\nhint: hpcddp.runtime({batch_size * ranks}) for {batch_size} per rank, as in plain DDP, or"
        f" hpcddp.runtime({batch_size})"
    )


def print_warning(warning: object | None, *, is_first: bool) -> None:
    """Print a warning, if there is one, to stderr of rank 0."""
    if warning is not None and is_first:
        print(f"hpcddp: warning: {warning}", file=sys.stderr)


def find_empty_ranks(models: Sequence[nn.Module], plan: BatchPlan, length: int | None) -> str | None:
    """A warning if SyncBatchNorm may meet a placeholder sample, which a rank without samples computes with.

    BatchNorm ignores that sample; SyncBatchNorm exchanges its statistics with the other ranks in the forward pass, so
    that the sample enters them. `length` of an epoch; None: it is not known.
    """
    if not any(isinstance(layer, nn.SyncBatchNorm) for model in models for layer in model.modules()):
        return None
    last = length % plan.global_batch if length is not None else 1
    idle = plan.data_size - 1  # the last rank's share is the smallest
    if all(piece.samples for total in (plan.global_batch, last) if total for piece in plan.pieces(idle, total)):
        return None
    return (
        f"a rank has no sample in some micro batches of {plan}, and SyncBatchNorm includes the placeholder that it"
        " computes with in its statistics\nhint: another global batch, or DataLoader(data, drop_last=True)"
    )
