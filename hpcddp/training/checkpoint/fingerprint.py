"""SHA-256 of models and of data: two runs are the same if these are, wherever the tensors lie."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.state_tree import gather_whole, module_state
from hpcddp.training.data.randomness import SeededSamples, WorkerStart, kept_generators
from hpcddp.training.data.stream import Stream
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.same_options import refuse_others

_PIECE = 1 << 24  # elements: what is copied from a device at once
_COMPARED = 8  # samples of a stream: the first alone may be the same by chance
_ROUNDING = 1e-3  # of a tensor's mean: other hardware rounds otherwise, other samples differ by more


def hash_states(objects: Mapping[str, nn.Module]) -> str:
    """SHA-256 over every parameter and every saved buffer of the models, by `object.name` in sorted order.

    Each goes in with its name, dtype, shape and bytes. The device, the memory format and a DDP wrapper around the model
    or around a part of it make no difference; one bit of one number does. A collective where tensors are split: one at
    a time is whole.
    """
    states = ((f"{name}.{path}", value) for name, one in objects.items() for path, value in module_state(one).items())
    found = {path: value for path, value in states if isinstance(value, Tensor)}
    digest = hashlib.sha256()
    for name in sorted(found):
        _add_tensor(digest, name, gather_whole(found[name], keep=True))
    return digest.hexdigest()


def draw_samples(dataset: Dataset[Any], num_workers: int = 0) -> list[Any]:
    """The first, the middle and the last sample, which stand for the data; of a stream the first one.

    They are drawn as in training (random transforms under one fixed key, in a loader process if training has any), and
    no generator outside moves.
    """
    if isinstance(dataset, IterableDataset):
        return list(Stream(dataset, 0, 0).read(1))
    return _draw_indices(dataset, _list_indices(dataset), num_workers)


def draw_and_repeat(dataset: Dataset[Any], num_workers: int = 0) -> tuple[list[Any], list[Any]]:
    """What `draw_samples` gives, and the first of them drawn once more under the same key; of a stream nothing more."""
    if isinstance(dataset, IterableDataset):
        return draw_samples(dataset, num_workers), []
    indices = _list_indices(dataset)
    samples = _draw_indices(dataset, indices + indices[:1], num_workers)
    return samples[: len(indices)], samples[len(indices) :]


def _list_indices(dataset: Dataset[Any]) -> list[int]:
    length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
    return sorted({0, length // 2, length - 1}) if length else []


def _draw_indices(dataset: Dataset[Any], indices: list[int], num_workers: int) -> list[Any]:
    if not indices:
        return []
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # torch does not annotate it
    with kept_generators(), torch.random.fork_rng(devices=devices):
        return list(_draw(dataset, indices, num_workers))


def repeats_itself(stream: IterableDataset[Any], num_workers: int = 0) -> bool:
    """Whether two passes over a stream, for one epoch and one seed, begin alike. Passes run where training's do."""
    loader: DataLoader[Any] = DataLoader(
        _Beginning(stream),
        batch_size=None,
        num_workers=min(num_workers, 1),
        collate_fn=_as_it_is,
        worker_init_fn=WorkerStart(None),
        generator=torch.Generator(),
    )
    first, second = (outline_samples(list(loader)) for _ in range(2))
    return is_alike(first, second)


class _Beginning(IterableDataset[Any]):
    """The first samples of a pass."""

    def __init__(self, stream: IterableDataset[Any]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(Stream(self._stream, 0, 0).read(_COMPARED))


def hash_choice(dataset: Dataset[Any]) -> str:
    """SHA-256 of which samples a `Subset` chose, of how many; a subset of a subset has both choices."""
    digest = hashlib.sha256()
    while isinstance(dataset, Subset):
        digest.update(f"{list(dataset.indices)}\n".encode())
        dataset = dataset.dataset
    return digest.hexdigest()


def outline_samples(samples: list[Any]) -> tuple[str, list[float]]:
    """(SHA-256, means): what is alike in these samples on other hardware too.

    The numbers of float tensors, which rounding changes, are not in the SHA-256: each tensor gives the mean of its
    numbers and of their magnitudes.
    """
    digest, means = hashlib.sha256(), list[float]()
    for sample in samples:
        _add_value(digest, _without_floats(sample, means))
    return digest.hexdigest(), means


def is_alike(one: tuple[str, list[float]], other: tuple[str, list[float]]) -> bool:
    """Whether two outlines are of the same samples, but for the rounding of their floats. NaN is like NaN."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    magnitudes = (abs(one[1][n | 1]) for n in range(len(one[1])))  # of a tensor's numbers, beside the mean of those
    return all(
        a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING * size)
        for a, b, size in zip(one[1], other[1], magnitudes, strict=True)
    )


def _without_floats(value: Any, means: list[float]) -> Any:
    """The sample with the shape of each tensor of floats in its place."""
    if isinstance(value, Tensor) and value.is_floating_point():
        means += [value.double().mean().item(), value.double().abs().mean().item()] if value.numel() else []
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: _without_floats(item, means) for key, item in value.items()}
    return [_without_floats(item, means) for item in value] if isinstance(value, list | tuple) else value


def _add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """The header tells how many bytes follow, so that no two sets of tensors give the same stream."""
    digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
    for piece in torch.split(tensor.detach().contiguous().reshape(-1), _PIECE):
        raw = piece.cpu().view(torch.uint8)
        if raw.numel():
            digest.update((ctypes.c_char * raw.numel()).from_address(raw.data_ptr()))  # no numpy, and no copy


def _draw(dataset: Dataset[Any], indices: list[int], num_workers: int) -> Iterator[Any]:
    """In a loader process if training has some: a file that is opened here would be shared by all of them."""
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, 0),
        batch_sampler=[[(0, index)] for index in indices],
        num_workers=min(num_workers, 1),
        collate_fn=_only,
        generator=torch.Generator(),
    )
    yield from loader


def _as_it_is(sample: Any) -> Any:
    return sample


def _only(samples: list[Any]) -> Any:
    return samples[0]


def _add_value(digest: hashlib._Hash, value: Any) -> None:
    """A sample, whatever it is made of; of an object without bytes, its type only."""
    if isinstance(value, Tensor):
        return _add_tensor(digest, "", value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        digest.update(f"{kind} {len(value)}\n".encode())
        for key, item in value.items():
            _add_value(digest, key)
            _add_value(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{kind} {len(value)}\n".encode())
        for item in value:
            _add_value(digest, item)
    else:
        raw = _raw_bytes(value)
        digest.update(f"{kind} {len(raw)}\n".encode() + raw)
    return None


def _raw_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value).encode("utf-8", "surrogatepass")
    if callable(getattr(value, "tobytes", None)):  # numpy's arrays and numbers, PIL's images
        form = [getattr(value, name, None) for name in ("dtype", "mode", "shape", "size")]
        return f"{form}\n".encode() + bytes(value.tobytes())
    return b""


# Whether all ranks read the same data.


_CALL = "DataLoader(…, {})"
_HINT = "give every rank the whole data set in one order, not divided by rank: the runtime deals the samples"


def outline_evaluation(dataset: Dataset[Any], batch_size: int) -> dict[str, Any]:
    """What of evaluation data has to be the same on every rank."""
    samples: int = len(dataset)  # type: ignore[arg-type]  # as in check_same_data
    return {"batch_size": batch_size, "samples": samples, "subset": hash_choice(dataset)[:12]}


def check_same_data(
    dataset: Dataset[Any],
    layout: Layout,
    samples: list[Any],
    num_workers: int = 0,
    options: Mapping[str, Any] | None = None,
) -> str | None:
    """RequestError, on every rank, if the ranks' data sets differ in length or are other parts of a data set, or if
    their streams differ in the first sample, or if a rank's DataLoader has other `options`. `samples`: what
    `draw_samples` drew.

    A collective. Returns a warning if the first, middle or last samples differ: the files were listed in another order,
    or the data are random numbers that were not seeded. A data set that gives another sample when it is asked again
    draws random numbers of its own, and is not compared so.
    """
    if layout.world_size == 1:
        return None
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        streams = _gather((options or {}, outline_samples(samples)), layout)
        refuse_others([theirs for theirs, _ in streams], _CALL)
        outlines = [theirs for _, theirs in streams]
        other = next((rank for rank, theirs in enumerate(outlines) if not is_alike(theirs, outlines[0])), None)
        if other is not None:
            raise RequestError(
                f"rank {other} gets another stream of this {kind}: its first sample is not that of rank 0", _HINT
            )
        return None
    facts = _gather((options or {}, len(dataset), hash_choice(dataset)), layout)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
    lengths = [length for _, length, _ in facts]
    other = _find_other(lengths)
    if other is not None:
        raise RequestError(
            f"rank {other} gets {lengths[other]} samples of this {kind}: rank 0 gets {lengths[0]}", _HINT
        )
    refuse_others([theirs for theirs, *_ in facts], _CALL)
    other = _find_other(facts)
    if other is not None:
        raise RequestError(f"rank {other} gets other samples of this {kind} than rank 0", _HINT)
    outlines = _gather(outline_samples(samples), layout)
    other = next((rank for rank, outline in enumerate(outlines) if not is_alike(outline, outlines[0])), None)
    if other is None:
        return None
    again = _gather(outline_samples(draw_samples(dataset, num_workers)), layout)
    if not all(is_alike(*both) for both in zip(again, outlines, strict=True)):
        return None
    return (
        f"rank {other} gets other samples of this {kind} than rank 0, where they were compared: the first, the middle"
        " and the last one\nhint: sort what is listed from files, or torch.manual_seed(0) before random data are made"
    )


def warn_of_passes(dataset: Dataset[Any], num_workers: int = 0) -> str | None:
    """A warning that a stream's order depends on more than epoch and seed, or None.

    Call it on all ranks: each pass moves what such a stream remembers.
    """
    if not isinstance(dataset, IterableDataset) or repeats_itself(dataset, num_workers):
        return None
    return (
        f"two passes over this {type(dataset).__name__} for one epoch begin with different samples: a resumed run would"
        " see some samples of its epoch twice and others never\nhint: in __iter__ shuffle a copy of the list, with"
        " random, torch or numpy themselves, which the runtime seeds, and no generator of its own"
    )


def warn_of_own_draws(dataset: Dataset[Any], samples: list[Any], repeated: list[Any]) -> str | None:
    """A warning that the first sample was another one when it was `repeated`, or None. See `draw_and_repeat`."""
    if is_alike(outline_samples(samples[: len(repeated)]), outline_samples(repeated)):
        return None
    return (
        f"the first sample of this {type(dataset).__name__} is another one when it is read again with the same seed:"
        " it draws from a random generator of its own, and the results depend on the number of ranks and loader"
        " processes\nhint: in __getitem__ draw from the global generator of torch, numpy or random, which the runtime"
        " seeds for each sample"
    )


def _gather(mine: Any, layout: Layout) -> list[Any]:
    everyones: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyones, mine)
    return everyones


def _find_other(facts: list[Any]) -> int | None:
    """The first rank whose fact is not that of rank 0."""
    return next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
