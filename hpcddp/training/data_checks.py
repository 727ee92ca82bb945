"""The training data of a run, looked at before its first step: what to warn of, and what its checkpoints say of it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from hpcddp.runs.jsonfile import write_object
from hpcddp.training.checkpoint.fingerprint import (
    check_same_data,
    describe_dataset,
    describe_other_data,
    draw_and_repeat,
    outline_data,
    warn_of_own_draws,
    warn_of_passes,
)
from hpcddp.training.data.reading import Source
from hpcddp.training.data.stream import check_passes
from hpcddp.training.remarks import describe_share, print_warning, warn_of_workers
from hpcddp.training.setup import RunSetup


class DataFacts:
    """What a run knows of its training data."""

    def __init__(self, setup: RunSetup) -> None:
        self.outline: dict[str, Any] | None = None  # for checkpoints; on rank 0, as soon as it is recorded
        self._setup = setup
        self._source: Source | None = None
        self._samples: list[Any] = []  # some of them, drawn, until they are recorded

    def look_at(self, source: Source) -> None:
        """Warn of what would go wrong with this data. RequestError if the ranks have different data, and for a stream
        that can be gone through once only."""
        setup, options, layout = self._setup, self._setup.options, self._setup.layout
        dataset, workers = source.dataset, source.reading.num_workers
        if isinstance(dataset, IterableDataset):
            check_passes(dataset)
        self._warn(warn_of_workers(workers))
        is_read = self._keeps or layout.world_size > 1
        self._source = source
        self._samples, repeated = draw_and_repeat(dataset, workers) if is_read else ([], [])
        self._warn(warn_of_own_draws(dataset, self._samples, repeated))
        sized = setup.global_batch is None or (options.max_micro_batch is None and options.exactness is None)
        self._warn(check_same_data(dataset, layout, self._samples, workers, source.list_common(sized=sized)))
        self._warn(warn_of_passes(dataset, workers))
        if source.is_share and source.batch_size is not None and setup.global_batch is None and layout.data_size > 1:
            self._warn(describe_share(source.batch_size, layout.data_size))

    def record(self) -> None:
        """Write data.json, on rank 0 of a run with a folder."""
        if self._source is not None and self._setup.folder is not None and self._keeps:
            write_object(self._setup.folder.data, describe_dataset(self._source.dataset, self._samples))
            self.outline = outline_data(self._source.dataset, self._samples)
        self._samples = []

    def describe_other(self, old: dict[str, Any] | None) -> str | None:
        """What differs from the data that a checkpoint was trained with; on rank 0."""
        other = None
        if self._source is not None and old is not None and self.outline is not None:
            other = describe_other_data(old, self.outline, self._source.dataset, self._source.reading.num_workers)
        return other

    @property
    def _keeps(self) -> bool:
        return self._setup.folder is not None and self._setup.group.is_first

    def _warn(self, warning: object | None) -> None:
        print_warning(warning, is_first=self._setup.group.is_first)
