"""The training data of a run, looked at before its first step: whether all ranks have the same, and what to warn of.

Only what is exact is compared: options, lengths, and which samples a Subset has. What the samples are is not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from hpcddp.errors import RequestError
from hpcddp.training.data.items import describe_items
from hpcddp.training.data.reading import Source
from hpcddp.training.data.stream import check_passes
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.remarks import describe_share, print_warning, warn_of_workers
from hpcddp.training.same_options import refuse_others
from hpcddp.training.setup import RunSetup


def check_data(source: Source, setup: RunSetup) -> None:
    """Warn of what would go wrong with this data. RequestError if the ranks have different data, and for a stream that
    can be gone through once only. A collective."""
    layout = setup.layout
    if isinstance(source.dataset, IterableDataset):
        check_passes(source.dataset)
    common = source.list_common(sized=setup.global_batch is None)
    if source.batch_sampler is not None:
        common["batch_sampler"] = describe_items(source.batch_sampler, setup.options.seed)
    check_same_data(source.dataset, layout, common)
    is_own_share = source.is_share and setup.global_batch is None and layout.data_size > 1
    warnings = [
        warn_of_workers(source.reading.num_workers),
        describe_share(source.batch_size, layout.data_size) if is_own_share and source.batch_size is not None else None,
    ]
    for warning in warnings:
        print_warning(warning, is_first=setup.group.is_first)


def check_same_data(dataset: Dataset[Any], layout: Layout, options: Mapping[str, Any]) -> None:
    """RequestError, on every rank, if the ranks' data sets differ in length or are other parts of a data set, or if a
    rank's DataLoader has other `options`. A collective."""
    if layout.world_size == 1:
        return
    kind = type(dataset).__name__
    everyones: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyones, (_count_samples(dataset), options, hash_choice(dataset)))
    lengths = [length for length, *_ in everyones]
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise RequestError(f"rank {rank} gets {length} samples of this {kind}: rank 0 gets {lengths[0]}", _HINT)
    refuse_others([theirs for _, theirs, _ in everyones], "DataLoader(…, {})")
    for rank, (*_, choice) in enumerate(everyones):
        if choice != everyones[0][-1]:
            raise RequestError(f"rank {rank} gets other samples of this {kind} than rank 0", _HINT)


def outline_evaluation(dataset: Dataset[Any], batch_size: int, *, drop_last: bool) -> dict[str, Any]:
    """What of evaluation data has to be the same on every rank."""
    options = {"batch_size": batch_size, "drop_last": drop_last}
    return options | {"samples": _count_samples(dataset), "subset": hash_choice(dataset)[:12]}


def hash_choice(dataset: Dataset[Any]) -> str:
    """SHA-256 of which samples a `Subset` chose, of how many; a subset of a subset has both choices."""
    digest = hashlib.sha256()
    while isinstance(dataset, Subset):
        digest.update(f"{list(dataset.indices)}\n".encode())
        dataset = dataset.dataset
    return digest.hexdigest()


def _count_samples(dataset: Any) -> int | str:
    """A stream may have no length."""
    return len(dataset) if hasattr(dataset, "__len__") else "any number of"


_HINT = "give every rank the whole data set in one order, not divided by rank: the runtime deals the samples"
