"""How far the training is in a stream, and reading on from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.samples.stream import Origin, RankSteps, Stream
from hpcddp.training.samples.weighing import Loaded, make_loaded


class StreamSampler:
    """The place in a stream, as `GlobalBatchSampler` for data with an index; `consumed` is its whole state.

    `length` is the samples of an epoch, if the data set has a `__len__`, else None: then epochs end where the stream
    does, and finding the place that belongs to `consumed` takes a pass over all epochs so far.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: BatchPlan, rank: int, *, seed: int = 0) -> None:
        self.length = len(dataset) if hasattr(dataset, "__len__") else None
        if self.length == 0:
            raise RequestError("the data set is empty", "check the path that the data set was made from")
        self.plan = plan
        self.rank = rank
        self.seed = seed
        self.epoch = 0  # that the next sample belongs to
        self.dataset = dataset
        self._began = 0  # samples consumed before this epoch
        self._consumed = 0
        self._end: tuple[int, int] | None = None  # an epoch whose end was seen, and its length

    @property
    def consumed(self) -> int:
        return self._consumed

    @consumed.setter
    def consumed(self, samples: int) -> None:
        self._consumed, self.epoch, self._began = samples, 0, 0
        if self.length is not None:
            self.epoch, place = divmod(samples, self.length)
            self._began = samples - place
            return
        while self.place:
            stream = Stream(self.dataset, self.seed, self.epoch)
            passed = stream.skip(self.place)
            if passed == self.place and stream.skip(1):
                return
            self._next_epoch(passed)

    @property
    def place(self) -> int:
        """How many samples of this epoch are consumed."""
        return self._consumed - self._began

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the end of this epoch (no end in sight if nobody knows); 0 after its last one."""
        if self.place == 0:
            return 0
        return -(-(self.length - self.place) // self.plan.global_batch) if self.length is not None else sys.maxsize

    def advance(self, samples: int) -> None:
        """One optimizer step was made, over this many samples on all ranks together."""
        self._consumed += samples
        if samples < self.plan.global_batch or self.place == self.length:
            self._next_epoch(self.place)

    def end_epoch(self, epoch: int) -> None:
        """The loop over this epoch's batches is over, at its end or before: the rest of it counts as consumed."""
        if self.epoch != epoch:
            return
        length = self.length
        if length is None and self._end is not None and self._end[0] == epoch:
            length = self._end[1]
        if length is None:
            stream = Stream(self.dataset, self.seed, epoch)
            length = stream.skip(self.place)
            while passed := stream.skip(self.plan.global_batch):
                length += passed
        self._consumed = self._began + length
        self._next_epoch(length)

    def saw_end(self, epoch: int, length: int) -> None:
        """The stream of this epoch has ended."""
        self._end = epoch, length

    def origin(self) -> Origin:
        """Where the rest of this epoch begins."""
        return Origin(self.plan, self.rank, self.seed, self.epoch, self.place)

    def __len__(self) -> int:
        """Micro batches left in this epoch."""
        if self.length is None:
            raise TypeError("this stream's length is not known")
        return -(-(self.length - self.place) // self.plan.global_batch) * self.plan.passes(self.rank)

    def _next_epoch(self, length: int) -> None:
        if length == 0:
            raise RequestError(f"the stream of epoch {self.epoch} is empty", "check the path that it is read from")
        self._began += length
        self.epoch += 1


def read_stream(
    sampler: StreamSampler,
    *,
    num_workers: int,
    pin_memory: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Callable[[], Iterator[Loaded]]:
    """A function that reads the rest of the sampler's epoch. RequestError for more loader processes than are of use."""
    if num_workers > 1 and not Stream(sampler.dataset, sampler.seed, sampler.epoch).can_skip:
        raise RequestError(
            f"{num_workers} loader processes would each read the whole stream: its iterator has no skip(count)",
            "num_workers=1, or hpcddp.training.samples.shards.ShardedStream, which can skip",
        )

    def read() -> Iterator[Loaded]:
        epoch, place, length = sampler.epoch, sampler.place, sampler.length
        # no persistent workers: they would have to be told of the next epoch
        loader: DataLoader[Any] = DataLoader(
            RankSteps(sampler.dataset, sampler.origin(), collate_fn),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
        )
        for step in loader:
            place += step[0][0].total
            if length is not None and place > length:
                raise _wrong_length(length, f"more than {place - 1}")
            for micro, loaded in step:
                yield make_loaded(micro, loaded)
        if length is not None and place < length:
            raise _wrong_length(length, str(place))
        if length is None:
            sampler.saw_end(epoch, place)

    return read


def _as_it_is(step: Any) -> Any:
    return step


def _wrong_length(length: int, found: str) -> RequestError:
    return RequestError(
        f"the stream says that it has {length} samples, and gave {found}",
        "correct its __len__, or leave it out: then the epoch ends where the stream does",
    )
