"""What rank 0 says of a training loop before it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch import nn

from hpcddp.batchplan import BatchPlan
from hpcddp.checks.check import Machine
from hpcddp.checks.environment import check_workers


def warn_of_workers(num_workers: int) -> object | None:
    """Too many loader processes for the CPUs that this rank may use."""
    return check_workers(num_workers, Machine(len(os.sched_getaffinity(0))))


def tell(warning: object | None, *, is_first: bool) -> None:
    """A warning, if there is one, on stderr of rank 0."""
    if warning is not None and is_first:
        print(f"hpcddp: warning: {warning}", file=sys.stderr)


def warn_of_empty_ranks(models: Sequence[nn.Module], plan: BatchPlan, length: int | None) -> str | None:
    """The last global batch of an epoch has fewer samples than there are ranks. `length` is None if nobody knows it.

    A rank without samples takes one along at weight 0. BatchNorm then neither uses nor changes its statistics of that
    one; SyncBatchNorm has to meet the other ranks in its forward pass, and so the sample gets into their statistics.
    """
    synchronised = any(isinstance(layer, nn.SyncBatchNorm) for model in models for layer in model.modules())
    last = length % plan.global_batch if length is not None else 1
    if not synchronised or last == 0 or last >= plan.world_size:
        return None
    found = f"{last} samples" if length is not None else "maybe fewer samples than ranks"
    return (
        f"the last global batch of an epoch has {found} for {plan.world_size} ranks, and SyncBatchNorm takes the"
        " statistics of what idle ranks carry along, too; another global batch avoids it"
    )
