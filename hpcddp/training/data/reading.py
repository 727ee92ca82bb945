"""How samples are read: the options of a DataLoader, given or taken over from an existing one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hpcddp.errors import RequestError
from hpcddp.training.data.randomness import WorkerStart


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of a DataLoader other than the data set and the order."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = True  # where there is a GPU
    keeps_workers: bool = True  # those of the training data, from epoch to epoch: they see no later change of the data
    more: dict[str, Any] = field(default_factory=dict)  # further arguments of DataLoader

    def options(self, device: torch.device) -> dict[str, Any]:
        """The arguments of a DataLoader on a rank with this device."""
        pin = self.pin_memory and device.type == "cuda"
        options = {"num_workers": self.num_workers, "collate_fn": self.collate_fn, "pin_memory": pin, **self.more}
        return options | {"worker_init_fn": WorkerStart(options.get("worker_init_fn"))}


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set, and how a DataLoader or the caller says that it is to be read."""

    dataset: Dataset[Any]
    batch_size: int | None  # None: nobody said
    shuffle: bool
    drop_last: bool
    reading: Reading
    is_share: bool = False  # batch_size is that of one rank: the DataLoader has a DistributedSampler
    has_items: bool = False  # what the DataLoader gives is a batch that the script has made
    batch_sampler: Iterable[Any] | None = None  # which makes it; None: the data set does

    @property
    def gives_items(self) -> bool:
        """Whether the data set returns whole batches (batch_size=None)."""
        return self.has_items and self.batch_sampler is None

    def list_common(self, *, sized: bool) -> dict[str, Any]:
        """List the options that must be the same on every rank, by their names in a DataLoader. `sized`: batch_size
        is used."""
        size = {"batch_size": self.batch_size} if sized else {}
        return {"shuffle": self.shuffle, "drop_last": self.drop_last, **size}


def read_how(data: Dataset[Any] | DataLoader[Any]) -> DataSource:
    """Take the options of a DataLoader; a data set is shuffled and read without workers.

    RequestError for a DataLoader that chooses samples itself.
    """
    if not isinstance(data, DataLoader):
        if not hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
            raise RequestError(
                f"a {type(data).__name__} is no data set",
                "rt.loader(dataset), rt.evaluation_loader(dataset, 256), or either with a DataLoader",
            )
        return DataSource(data, None, True, False, Reading())
    if data.drop_last and isinstance(data.dataset, IterableDataset):
        raise RequestError(
            "drop_last does not go with a stream, whose end nobody knows", "DataLoader(…, drop_last=False)"
        )
    more: dict[str, Any] = {
        "worker_init_fn": data.worker_init_fn,
        "timeout": data.timeout,
        "multiprocessing_context": data.multiprocessing_context,
    }
    if data.num_workers > 0:
        more["prefetch_factor"] = data.prefetch_factor
    size = data.batch_size
    return DataSource(
        data.dataset,
        size,
        _read_shuffle(data),
        data.drop_last,
        Reading(data.num_workers, data.collate_fn, data.pin_memory, data.persistent_workers, more),
        is_share=isinstance(data.sampler, DistributedSampler),
        has_items=size is None,
        batch_sampler=data.batch_sampler if size is None else None,
    )


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether the DataLoader has shuffle=True, as training data has."""
    sampler = loader.sampler
    return isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)


def _read_shuffle(loader: DataLoader[Any]) -> bool:
    """Whether the DataLoader shuffles. RequestError for one that chooses or changes samples in its own way."""
    dataset, sampler = loader.dataset, loader.sampler
    if type(loader).__iter__ is DataLoader.__iter__:
        if isinstance(dataset, IterableDataset):
            return False
        samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
            return True
        if type(sampler) is SequentialSampler and len(sampler.data_source) == samples:
            return False
        if (
            isinstance(sampler, DistributedSampler)  # which of its samples a rank sees is the runtime's affair
            and type(sampler).__iter__ is DistributedSampler.__iter__
            and len(sampler.dataset) == samples  # type: ignore[arg-type]  # as above
        ):
            return sampler.shuffle
    raise RequestError(
        f"the {type(loader).__name__} with a {type(sampler).__name__} chooses or changes samples itself, and the"
        " runtime deals all samples of the data set",
        "a plain DataLoader with shuffle=True or shuffle=False; choose, weigh and change samples in the data set, as"
        " torch.utils.data.Subset does",
    )
