"""Training data: this rank's share of each global batch, on the device, whole or in micro batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import tee
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hpcddp.batchplan import BatchPlan, split_evenly
from hpcddp.errors import RequestError
from hpcddp.training.data.items import ItemSampler
from hpcddp.training.data.randomness import SeededSamples, fork_generators, seed_generators
from hpcddp.training.data.reading import DataSource, Reading
from hpcddp.training.data.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.data.stream import StreamSampler, read_stream
from hpcddp.training.data.weighing import WeighedBatch, Weighing
from hpcddp.training.mistakes import BATCH_UNPACKED


def map_parts(content: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists, named tuples, dicts and dataclasses with each tensor, and each other object that has a
    `to(device)` method, such as a tokenizer's batch, replaced by `change(part)`."""
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, dict) and (type(content) is dict or not hasattr(content, "to")):
        changed = {key: map_parts(value, change) for key, value in content.items()}
        return changed if type(content) is dict else type(content)(changed)
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*(map_parts(value, change) for value in content))
    if isinstance(content, list | tuple):
        return type(content)([map_parts(value, change) for value in content])
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        fields = [field.name for field in dataclasses.fields(content) if field.init]
        return dataclasses.replace(content, **{name: map_parts(getattr(content, name), change) for name in fields})
    return change(content) if callable(getattr(content, "to", None)) else content


def move(content: Any, device: torch.device) -> Any:
    """Move it to the device: tensors are copied without waiting, other objects move themselves."""
    return map_parts(
        content, lambda part: part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)
    )


class Batch:
    """This rank's share of one global batch: one optimizer step. Where it may be several micro batches, the loop gets
    this object, which only `rt.micro_batches` opens."""

    def __init__(self, parts: Sequence[WeighedBatch], device: torch.device, *, is_several: bool) -> None:
        self.parts = parts
        self.is_several = is_several
        self._device = device
        # what the loop gets: this object, or what the samples collate to
        self.content: Any = self if is_several else move(parts[0].content, device)

    def contents(self) -> Iterator[tuple[WeighedBatch, Any]]:
        """Each micro batch on the device."""
        for part in self.parts:
            yield part, move(part.content, self._device)

    def _refuse(self, *_: object) -> Any:
        raise BATCH_UNPACKED.error()

    __iter__ = __len__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BATCH_UNPACKED.error()


class LoopListener(Protocol):
    """The loop over a loader, which is called back: `training.loop.TrainingLoop`."""

    @property
    def run_is_over(self) -> bool: ...
    @property
    def inside(self) -> bool: ...
    def end_left_batch(self) -> None: ...
    def loop_starts(self, epoch: int) -> None: ...
    def count_batch(self) -> None: ...
    def batch_starts(self, batch: Batch) -> None: ...
    def batch_left(self, batch: Batch) -> None: ...
    def step_ends(self) -> bool: ...
    def reseed(self) -> None: ...


Sampler = GlobalBatchSampler | ItemSampler


class _Draws:
    """The sampler's indices with their epoch, for SeededSamples. `micros`: the micro batches of the newest pass."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.micros: Iterator[MicroBatch] = iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, (micros, draws) = self._sampler.epoch, tee(self._sampler.draws())
        self.micros = (micro for micro, _ in micros)
        return ([(epoch, index) for index in indices] for _, indices in draws)


def draws_in_collate(reading: Reading) -> bool:
    """Whether the caller's own code makes a batch of the samples: it may draw random numbers."""
    return reading.collate_fn not in (None, default_collate)


def read_samples(
    dataset: Dataset[Any], sampler: Sampler, device: torch.device, reading: Reading
) -> Callable[[], Iterator[tuple[MicroBatch, Any]]]:
    """A function that reads the rest of the sampler's epoch."""
    options, draws = reading.options(device), _Draws(sampler)
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, sampler.seed, collates=draws_in_collate(reading)),
        batch_sampler=draws,
        persistent_workers=reading.num_workers > 0 and reading.keeps_workers,
        generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
        **options,
    )

    def read() -> Iterator[tuple[MicroBatch, Any]]:
        contents = iter(loader)  # it begins to draw
        return zip(draws.micros, contents, strict=True)

    return read


def make_sampler(source: DataSource, plan: BatchPlan, data_rank: int, seed: int) -> Sampler | StreamSampler:
    """The sampler for data with an index, for a stream, or for batches that the script makes."""
    dataset = source.dataset
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset, plan, data_rank, seed=seed)
    samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
    if source.batch_sampler is not None:
        return ItemSampler(source.batch_sampler, samples, plan, data_rank, seed=seed)
    return GlobalBatchSampler(samples, plan, data_rank, seed=seed, shuffle=source.shuffle, drop_last=source.drop_last)


class TrainingLoader:
    """Iterating gives the rest of the current epoch: each batch is this rank's share of a global batch, on the device.

    `is_several`: the loop goes over each batch in micro batches, so that it gets a `Batch`; else what the samples
    collate to.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler | StreamSampler,
        device: torch.device,
        weighing: Weighing,
        reading: Reading,
        listener: LoopListener,
        *,
        is_several: bool,
    ) -> None:
        self.dataset = dataset
        self.batch_size = sampler.plan.global_batch  # for scripts that ask
        self.sampler = sampler
        self.weighing = weighing
        self._is_several = is_several
        self._listener = listener
        self._device = device
        collates = reading.num_workers == 0 and draws_in_collate(reading)
        self._may_draw = collates or weighing.count is not None  # the caller's code, in this process
        if isinstance(sampler, StreamSampler):
            self._read = read_stream(sampler, device, reading)
        else:
            self._read = read_samples(dataset, sampler, device, reading)

    def __len__(self) -> int:
        """Steps of a whole epoch, also where a resumed run reads the rest. TypeError if that is not known."""
        if self.sampler.length is None:
            raise TypeError("the length of this loader's data is not known")
        return -(-self.sampler.length // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        listener = self._listener
        listener.end_left_batch()  # the step of a loop before counts, and may be the last of its epoch
        self._check_length()
        listener.loop_starts(self.sampler.epoch)
        if listener.run_is_over:
            return
        for batch in self._batches():
            listener.batch_starts(batch)
            try:
                yield batch.content
            except GeneratorExit:
                listener.batch_left(batch)
                raise
            ends = listener.step_ends()
            if self._may_draw:
                listener.reseed()
            if ends:
                break
        listener.reseed()

    def _batches(self) -> Iterator[Batch]:
        return (Batch(parts, self._device, is_several=self._is_several) for parts in self.weighing.steps(self._read()))

    def _check_length(self) -> None:
        """RequestError if the data set has another length than when the sampler was made."""
        before = getattr(self.sampler, "samples", None)  # a stream's are not known
        if before is not None and (now := len(self.dataset)) != before:  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
            raise RequestError(
                f"this {type(self.dataset).__name__} has {now} samples now, and had {before} when its loader was made",
                "give it its last length from the start; or begin a new run after each change: hpcddp.runtime(…)",
            )

    def close(self) -> None:
        """End the loader processes, which would keep the open sockets of this process open. No more is read."""
        self._read = lambda: iter(())


# ---- further training data, such as unlabelled samples


@dataclasses.dataclass(eq=False)
class _Pass:
    """A loop over a second loader: a pass over its data, or the rest of one."""

    epoch: int
    is_open: bool = True
    is_used: bool = False  # whether a backward pass came after one of its batches


class Taken(NamedTuple):
    """A batch that a loop over a second loader has taken."""

    batch: Batch
    loop: _Pass
    place: tuple[int, int]  # pass and position behind it


class SecondLoader(TrainingLoader):
    """A further training loader, whose batches belong to the steps of the first one's. Each loop over it is a new pass:
    its order follows seed, loader and pass.

    A batch belongs to the step whose `rt.backward` follows it. `place`, for a checkpoint, is where the open loop
    continues, or else the next one begins: as of the last step, whatever was taken since.
    """

    place = (0, 0)  # pass and position
    is_used_up = False  # whether the open loop has no batch left: the first loader's may end with it
    _loop: _Pass | None = None  # the open one
    _is_held = False  # whether the open one was open when an epoch ended, and has given nothing since
    _used = 0  # of the taken ones, those before the last backward pass

    def __init__(self, *arguments: Any, number: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.number = number
        self.taken: list[Taken] = []  # for the step that the training is at, and ahead of it

    def __iter__(self) -> Iterator[Any]:
        if self._is_held or (self._loop is not None and self._loop.is_used):
            raise RequestError(
                f"a loop over training loader {self.number} began, and the script held the one before, with batches"
                " left: a resumed run would continue that",
                "for a, b in zip(first, second): …, without a name for the zip or its progress bar, or with del at the"
                " end; or one iterator for all epochs, and the next one when it has ended",
            )
        self._check_length()
        if self._listener.run_is_over:
            return
        self.sampler.epoch, self.sampler.position = self._find_start()
        loop = self._loop = _Pass(self.sampler.epoch)
        try:
            for batch in self._drawn():
                if self._loop is not loop:
                    raise RequestError(
                        f"two loops over training loader {self.number} ran in turn",
                        "take the batches of one loop at a time",
                    )
                self._is_held = False
                self.sampler.advance(batch.parts[-1].micro)
                self.taken.append(Taken(batch, loop, (self.sampler.epoch, self.sampler.position)))
                self._listener.count_batch()
                yield batch.content
        finally:
            self._end(loop)

    def _find_start(self) -> tuple[int, int]:
        if self._listener.inside and self.taken:  # further ones in the same step
            last = self.taken[-1]
            return last.loop.epoch + 1, 0
        self.taken.clear()
        return self.place

    def _drawn(self) -> Iterator[Batch]:
        """The batches. What the script's own code draws for them comes from a key of this loader and its place."""
        if not self._may_draw:
            yield from self._batches()
            return
        batches = self._batches()
        while True:
            with fork_generators():
                seed_generators("second", self.sampler.seed, self.sampler.epoch, self.sampler.position)
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _end(self, loop: _Pass) -> None:
        loop.is_open = False
        if self._loop is loop:
            self._loop, self.is_used_up = None, False
        if loop.is_used and self.place[0] == loop.epoch:
            self.place = loop.epoch + 1, 0

    def forget(self) -> None:
        """A loop over the first loader begins: what was only looked at before belongs to no step."""
        self.taken = [one for one in self.taken if one.loop.is_open or one.loop.is_used]

    def epoch_ends(self) -> None:
        """An epoch of rt.epochs is over: a checkpoint says that the loop which is open, if there is one, continues."""
        self._is_held = self._loop is not None and self._loop.is_used and not self.is_used_up

    def use(self) -> None:
        """A backward pass comes: what was taken by now belongs to this step."""
        self._used = len(self.taken)
        for one in self.taken:
            one.loop.is_used = True

    def step_ends(self) -> None:
        """The step is over: the place is behind what belongs to it."""
        if self._used:
            last = self.taken[self._used - 1]
            del self.taken[: self._used]
            self._used = 0
            self.place = last.place if last.loop.is_open else (last.loop.epoch + 1, 0)
            self.is_used_up = last.batch.parts[0].micro.ends_epoch and last.loop.is_open


def are_in_proportion(first: MicroBatch, second: MicroBatch, ranks: int) -> bool:
    """Whether each rank has the same part of both global batches: then one weight is right for a loss over both."""
    shares = zip(split_evenly(first.total, ranks), split_evenly(second.total, ranks), strict=True)
    alike = all(one * second.total == other * first.total for one, other in shares)
    return alike and first.samples * second.total == second.samples * first.total


def is_of_batch(content: Any, wanted: Any) -> bool:
    """Whether this is the batch itself, or a tensor in it: the same object, not an equal one."""
    if content is wanted:
        return True
    parts: list[Any] = []

    def collect(part: Any) -> Any:
        parts.append(part)
        return part

    map_parts(list(content.values()) if isinstance(content, Mapping) else content, collect)
    return any(part is wanted for part in parts)
