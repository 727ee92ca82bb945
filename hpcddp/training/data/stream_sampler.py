"""The position of the training in a stream, and reading from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import check_epoch
from hpcddp.training.data.stream import RankSteps, Stream, StreamStart
from hpcddp.training.data.weighing import Loaded
from hpcddp.units import format_count


class StreamSampler:
    """The position in a stream, as `GlobalBatchSampler` for data with an index. `consumed` is its state.

    `length` is the number of samples of an epoch if the data set has a `__len__`, else None. Without it an epoch ends
    where the stream does, and finding the position for a value of `consumed` reads all epochs so far.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: BatchPlan, data_rank: int, *, seed: int = 0) -> None:
        self.length = len(dataset) if hasattr(dataset, "__len__") else None
        if self.length == 0:
            raise RequestError("the data set is empty", "check the path that the data set was made from")
        self.plan = plan
        self.data_rank = data_rank
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
            self.epoch, position = divmod(samples, self.length)
            self._began = samples - position
            return
        while self.position:
            stream = Stream(self.dataset, self.seed, self.epoch)
            passed = stream.skip(self.position)
            if passed == self.position and stream.skip(1):
                return
            self._next_epoch(passed)

    @property
    def position(self) -> int:
        """How many samples of this epoch are consumed."""
        return self._consumed - self._began

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the end of this epoch, sys.maxsize if that is not known; 0 after its last one."""
        if self.position == 0:
            return 0
        return -(-(self.length - self.position) // self.plan.global_batch) if self.length is not None else sys.maxsize

    def advance(self, samples: int) -> None:
        """One optimizer step was made, over this many samples on all ranks together."""
        self._consumed += samples
        if samples < self.plan.global_batch or self.position == self.length:
            self._next_epoch(self.position)

    def end_epoch(self, epoch: int) -> None:
        """The loop over this epoch's batches is over, at its end or before: the rest of it counts as consumed."""
        if self.epoch != epoch:
            return
        length = self.length
        if length is None and self._end is not None and self._end[0] == epoch:
            length = self._end[1]
        if length is None:
            stream = Stream(self.dataset, self.seed, epoch)
            length = stream.skip(self.position)
            while passed := stream.skip(self.plan.global_batch):
                length += passed
        self._consumed = self._began + length
        self._next_epoch(length)

    def set_epoch(self, epoch: int) -> None:
        """As of `GlobalBatchSampler`."""
        check_epoch(epoch, self.epoch, self.position)

    def saw_end(self, epoch: int, length: int) -> None:
        """The stream of this epoch has ended."""
        self._end = epoch, length

    def start(self) -> StreamStart:
        """Where the rest of this epoch starts."""
        return StreamStart(self.plan, self.data_rank, self.seed, self.epoch, self.position)

    def __len__(self) -> int:
        """Micro batches of an epoch. TypeError if the stream's length is not known."""
        if self.length is None:
            raise TypeError("this stream's length is not known")
        return -(-self.length // self.plan.global_batch) * self.plan.passes(self.data_rank)

    def _next_epoch(self, length: int) -> None:
        if length == 0:
            raise RequestError(f"the stream of epoch {self.epoch} is empty", "check the path that it is read from")
        self._began += length
        self.epoch += 1


def read_stream(sampler: StreamSampler, device: torch.device, reading: Reading) -> Callable[[], Iterator[Loaded]]:
    """A function that reads the rest of the sampler's epoch. RequestError for too many loader processes."""
    num_workers = reading.num_workers
    if num_workers > 1 and not Stream(sampler.dataset, sampler.seed, sampler.epoch).can_skip:
        raise RequestError(
            f"{num_workers} loader processes would each read the whole stream: its iterator has no skip(count)",
            "num_workers=1, or hpcddp.training.data.shards.ShardedStream, which can skip",
        )

    def read() -> Iterator[Loaded]:
        epoch, position, length = sampler.epoch, sampler.position, sampler.length
        # no persistent workers: they would keep the epoch that they were started with
        loader: DataLoader[Any] = DataLoader(
            RankSteps(sampler.dataset, sampler.start(), reading.collate_fn),
            batch_size=None,
            generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
            **reading.options(device) | {"collate_fn": _as_it_is},
        )
        for step in loader:
            position += step[0][0].total
            if length is not None and position > length:
                raise _wrong_length(length, f"more than {position - 1}")
            for micro, loaded in step:
                yield Loaded(micro, loaded)
        if length is not None and position < length:
            raise _wrong_length(length, str(position))
        if length is None:
            sampler.saw_end(epoch, position)

    return read


def _as_it_is(step: Any) -> Any:
    return step


def _wrong_length(length: int, found: str) -> RequestError:
    return RequestError(
        f"the stream says that it has {format_count(length, 'sample')}, and gave {found}",
        "correct its __len__, or leave it out: then the epoch ends where the stream does",
    )
