"""Training data: this rank's share of each global batch, on the device, whole or in micro batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hpcddp.batchplan import BatchPlan
from hpcddp.training.data.randomness import SeededSamples
from hpcddp.training.data.reading import Reading, check_length
from hpcddp.training.data.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.data.stream import StreamSampler, read_stream
from hpcddp.training.data.weighing import Loaded, Weighing, Weight
from hpcddp.training.mistakes import BATCH_UNPACKED

# Batches from the host to the device of this rank.


def move(thing: Any, device: torch.device) -> Any:
    """The tensors in tuples, lists, named tuples, dicts and dataclasses, copied to the device without waiting.

    Other objects with a `to(device)` method, such as a tokenizer's batch, are moved by it.
    """
    if isinstance(thing, Tensor):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, dict):
        moved = {key: move(value, device) for key, value in thing.items()}
        return moved if type(thing) is dict else _like(thing, moved, device)
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(move(value, device) for value in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(move(value, device) for value in thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [field for field in dataclasses.fields(thing) if field.init]
        return dataclasses.replace(thing, **{f.name: move(getattr(thing, f.name), device) for f in fields})
    if callable(to := getattr(thing, "to", None)):
        return to(device)
    return thing


def find_tensors(thing: Any) -> list[Tensor] | None:
    """The tensors that `move` copies by itself; None if a part is moved by a `to` of its own, which may copy others."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return _find_all(thing.values()) if type(thing) is dict or not hasattr(thing, "to") else None
    if isinstance(thing, list | tuple):
        return _find_all(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return _find_all(getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init)
    return None if callable(getattr(thing, "to", None)) else []


def _find_all(parts: Iterable[Any]) -> list[Tensor] | None:
    found: list[Tensor] = []
    for part in parts:
        tensors = find_tensors(part)
        if tensors is None:
            return None
        found += tensors
    return found


def _like(thing: Any, moved: dict[Any, Any], device: torch.device) -> Any:
    """A subclass of dict stays one: by its own `to`, else made from the moved items."""
    return thing.to(device) if callable(getattr(thing, "to", None)) else type(thing)(moved)


# Batches on their way to the device: beside the computation, on a CUDA stream of their own.


class Copies(Protocol):
    """Starts a copy to the device, and hands it over to the computation later."""

    def start(self, content: Any) -> Callable[[], Any]:
        """Begin to copy. Calling the result, once and just before it is used, gives what lies on the device."""


class StreamCopies:
    """Copies on a CUDA stream of their own, beside what the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def start(self, content: Any) -> Callable[[], Any]:
        if find_tensors(content) is None:  # nobody could tell the allocator about the copies that it makes itself
            return lambda: move(content, self._device)
        with torch.cuda.stream(self._stream):
            moved = move(content, self._device)
            copied = self._stream.record_event()

        def hand_over() -> Any:
            using = torch.cuda.current_stream(self._device)
            using.wait_event(copied)
            for tensor in find_tensors(moved) or ():
                if tensor.is_cuda:
                    tensor.record_stream(using)  # its memory is free again when this stream is done with it
            return moved

        return hand_over


class PlainCopies:
    """Copies when they are needed: on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, content: Any) -> Callable[[], Any]:
        return lambda: move(content, self._device)


def open_copies(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else PlainCopies(device)


class Part(NamedTuple):
    """One micro batch of a batch: this rank's samples of it, and how much they weigh."""

    micro: MicroBatch
    weight: Weight


class Batch:
    """This rank's share of one global batch: one optimizer step.

    Where it is several micro batches, or may be on another number of ranks, the loop gets this object, which nothing
    but `rt.micro_batches` opens.
    """

    def __init__(self, parts: Sequence[Part], contents: Sequence[Any], copies: Copies, *, is_several: bool) -> None:
        self.parts = parts
        self.is_several = is_several
        self._contents = contents
        self._copies = copies

    def contents(self) -> Iterator[tuple[Part, Any]]:
        """Each micro batch on the device. The copy of the next has begun when one is given out."""
        waiting: Callable[[], Any] | None = None
        for nth, part in enumerate(self.parts):
            ready = waiting or self._copies.start(self._contents[nth])
            waiting = self._copies.start(self._contents[nth + 1]) if nth + 1 < len(self.parts) else None
            yield part, ready()

    def __iter__(self) -> Iterator[Any]:
        raise BATCH_UNPACKED.error()

    def __len__(self) -> int:
        raise BATCH_UNPACKED.error()

    def __getitem__(self, _key: object) -> Any:
        raise BATCH_UNPACKED.error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BATCH_UNPACKED.error()


# How long a training loop waits for its input, measured for each micro batch; a warning, once, where it is much.


Item = TypeVar("Item")

_UNCOUNTED = 10  # micro batches at the start of an attempt: workers start, caches fill
_JUDGED_AFTER = 100  # micro batches
_JUDGED_AFTER_S = 10.0
_MUCH = 0.1  # of the time
_MUCH_S = 0.005  # per micro batch: less than this is indexing a tensor, and no loader process would help


class InputWait:
    """Two looks at the clock per micro batch. `write` gets the numbers of each loop over the loader, `say` the share of
    the time, once, if it is more than a tenth. `clock` is in seconds, from anywhere.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        say: Callable[[float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._write = write
        self._say = say
        self._clock = clock
        self._said = False
        self._seen = -_UNCOUNTED  # micro batches
        self._waited = self._took = 0.0  # over those that count, in seconds
        self._loop: tuple[int, int, float, float] | None = None  # epoch, micro batches, seconds waited and seconds

    def over(self, items: Iterable[Item], epoch: int) -> Iterator[Item]:
        """The same items. What `next` takes is waiting; what the loop does between them is not."""
        self.end_loop()
        clock, ask = self._clock, iter(items).__next__
        waited, count = 0.0, 0
        began = asked = before = clock()
        while True:
            try:
                item = ask()
            except StopIteration:
                return
            now = clock()
            wait = now - asked
            waited += wait
            count += 1
            self._loop = (epoch, count, waited, now - began)
            if not self._said:
                self._judge(wait, now - before)
            before = now
            yield item
            asked = clock()

    def end_loop(self) -> None:
        """Write how long the loop over the loader waited that has ended, at its end or before."""
        if self._loop is not None:
            epoch, count, waited, took = self._loop
            self._loop = None
            share = round(waited / took, 4) if took > 0 else 0.0
            numbers = {"micro_batches": count, "wait_s": round(waited, 4), "loop_s": round(took, 4), "share": share}
            self._write({"epoch": epoch, **numbers})

    def _judge(self, wait_s: float, took_s: float) -> None:
        self._seen += 1
        if self._seen <= 0:
            return
        self._waited += wait_s
        self._took += took_s
        if self._seen >= _JUDGED_AFTER and self._took >= _JUDGED_AFTER_S:
            self._said = self._waited > max(_MUCH * self._took, _MUCH_S * self._seen)
            if self._said:
                self._say(self._waited / self._took)


class Listener(Protocol):
    """What a loader tells of the loop over it, as it goes on."""

    @property
    def stopping(self) -> bool:
        """Whether the loop is to end after this step."""

    @property
    def run_is_over(self) -> bool:
        """Whether there are no batches for this loop, since the run was finished before."""

    def settle(self) -> None:
        """The loop before is over, if there was one, perhaps since it was left."""

    def loop_starts(self, epoch: int) -> None:
        """The loop over the rest of this epoch starts."""

    def last_step_starts(self) -> None:
        """The loop is about to get the epoch's last batch. May raise to end it there."""

    def batch_starts(self, batch: Batch) -> None:
        """The loop gets this batch now."""

    def batch_left(self, batch: Batch) -> None:
        """The loop was left in this batch, or has taken it and no other."""

    def step_ends(self) -> None:
        """The loop has come back for more: this batch is over."""

    def seed_between(self) -> None:
        """What draws random numbers before the next batch starts, draws by the number of steps."""


class _Draws:
    """The sampler's indices with their epoch, as SeededSamples wants them."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._sampler.epoch
        return ([(epoch, index) for index in indices] for indices in self._sampler)


def draws_in_collate(reading: Reading) -> bool:
    """Whether the caller's own code makes a batch of the samples: it may draw random numbers."""
    return reading.collate_fn not in (None, default_collate)


def read_samples(
    dataset: Dataset[Any], sampler: GlobalBatchSampler, device: torch.device, reading: Reading
) -> Callable[[], Iterator[Loaded]]:
    """A function that reads the rest of the sampler's epoch."""
    options = reading.options(device)
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, sampler.seed, collates=draws_in_collate(reading)),
        batch_sampler=_Draws(sampler),
        persistent_workers=reading.num_workers > 0 and reading.keeps_workers,
        generator=torch.Generator(),  # an iterator draws a seed: not from the generator of the user's loop
        **options,
    )
    return lambda: (Loaded(*both) for both in zip(sampler.micro_batches(), loader, strict=True))


def make_sampler(
    dataset: Dataset[Any], plan: BatchPlan, data_rank: int, *, seed: int, shuffle: bool, drop_last: bool = False
) -> GlobalBatchSampler | StreamSampler:
    """The sampler for data with an index, or for a stream."""
    if isinstance(dataset, IterableDataset):
        return StreamSampler(dataset, plan, data_rank, seed=seed)
    samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
    return GlobalBatchSampler(samples, plan, data_rank, seed=seed, shuffle=shuffle, drop_last=drop_last)


class TrainingLoader:
    """Iterating gives the rest of the current epoch: each batch is this rank's share of a global batch, on the device.

    `is_several`: the loop goes over each batch in micro batches, so that it gets a `Batch`; else what the samples
    collate to.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatchSampler | StreamSampler,
        device: torch.device,
        weighing: Weighing,
        reading: Reading,
        listener: Listener,
        waits: InputWait,
        *,
        is_several: bool,
    ) -> None:
        self.dataset = dataset
        self.batch_size = sampler.plan.global_batch  # for scripts that ask
        self.num_workers = reading.num_workers
        self.collate_fn = reading.collate_fn
        self.sampler = sampler
        self.weighing = weighing
        self._is_several = is_several
        self._listener = listener
        self._waits = waits
        self._copies = open_copies(device)
        collates = reading.num_workers == 0 and draws_in_collate(reading)
        self._may_draw = collates or weighing.count is not None  # the caller's code, in this process
        # one batch ahead only where that runs none of the caller's code earlier, and waits for no other rank
        indexed = isinstance(sampler, GlobalBatchSampler)
        self._ahead = device.type == "cuda" and reading.num_workers > 0 and indexed and weighing.count is None
        if isinstance(sampler, GlobalBatchSampler):
            self._read = read_samples(dataset, sampler, device, reading)
        else:
            self._read = read_stream(sampler, device, reading)

    def __len__(self) -> int:
        """Steps of a whole epoch, also where a resumed run reads the rest. TypeError if that is not known."""
        if self.sampler.length is None:
            raise TypeError("this stream's length is not known")
        return -(-self.sampler.length // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        listener = self._listener
        self._start()
        if listener.run_is_over:
            return
        for batch, content in self._batches():
            if batch.parts[0].micro.ends_epoch:
                listener.last_step_starts()
            listener.batch_starts(batch)
            try:
                yield batch if self._is_several else content()
            except GeneratorExit:
                listener.batch_left(batch)
                raise
            listener.step_ends()
            if self._may_draw:
                listener.seed_between()
            if listener.stopping:
                break
        listener.seed_between()

    def _batches(self) -> Iterator[tuple[Batch, Callable[[], Any]]]:
        """Each batch, and what gives its content on the device. The copy of the next may have begun before."""
        waiting: tuple[Batch, Callable[[], Any]] | None = None
        for parts in self.weighing.steps(self._waits.over(self._read(), self.sampler.epoch)):
            contents = [loaded.content for loaded, _ in parts]
            known = [Part(loaded.micro, weight) for loaded, weight in parts]
            batch = Batch(known, contents, self._copies, is_several=self._is_several)
            if self._is_several:
                yield batch, _nothing
                continue
            now = batch, self._copies.start(contents[0])
            if not self._ahead:
                yield now
                continue
            if waiting is not None:
                yield waiting
            waiting = now
        if waiting is not None:
            yield waiting

    def _start(self) -> None:
        """A loop starts. RequestError if the data set has another length than when the sampler was made."""
        self._listener.settle()  # its step counts, and may be the last of its epoch
        if isinstance(self.sampler, GlobalBatchSampler):
            check_length(self.dataset, self.sampler.samples)
        self._listener.loop_starts(self.sampler.epoch)

    def close(self) -> None:
        """End the loader processes, which would keep the open sockets of this process open. No more is read."""
        self._waits.end_loop()
        self._read = lambda: iter(())


def _nothing() -> None:
    """The content of a batch in micro batches, which `rt.micro_batches` gives."""
