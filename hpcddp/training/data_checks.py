"""The training data of a run, looked at before its first step: whether all ranks have the same, and what to warn of."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from hpcddp.training.checkpoint.fingerprint import check_same_data, draw_and_repeat, warn_of_own_draws, warn_of_passes
from hpcddp.training.data.items import describe_items
from hpcddp.training.data.reading import Source
from hpcddp.training.data.stream import check_passes
from hpcddp.training.remarks import describe_share, print_warning, warn_of_workers
from hpcddp.training.setup import RunSetup


def check_data(source: Source, setup: RunSetup) -> None:
    """Warn of what would go wrong with this data. RequestError if the ranks have different data, and for a stream that
    can be gone through once only. A collective."""
    options, layout = setup.options, setup.layout
    dataset, workers = source.dataset, source.reading.num_workers
    if isinstance(dataset, IterableDataset):
        check_passes(dataset)
    samples, repeated = draw_and_repeat(dataset, workers) if layout.world_size > 1 else ([], [])
    sized = setup.global_batch is None or (options.max_micro_batch is None and options.exactness is None)
    common = source.list_common(sized=sized)
    if source.batch_sampler is not None:
        common["batch_sampler"] = describe_items(source.batch_sampler, options.seed)
    is_own_share = source.is_share and setup.global_batch is None and layout.data_size > 1
    warnings = [
        warn_of_workers(workers),
        warn_of_own_draws(dataset, samples, repeated),
        check_same_data(dataset, layout, samples, workers, common),
        warn_of_passes(dataset, workers),
        describe_share(source.batch_size, layout.data_size) if is_own_share and source.batch_size is not None else None,
    ]
    for warning in warnings:
        print_warning(warning, is_first=setup.group.is_first)
