"""Whether all ranks, and all attempts of a run, read the same data.

The runtime deals the samples, so data that are divided already lose most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.fingerprint import (
    describe_dataset,
    draw_rows,
    draw_samples,
    hash_choice,
    is_alike,
    outline_samples,
    repeats_itself,
)
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.same_options import refuse_others

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
        streams = _gather((options or {}, describe_dataset(dataset, samples)), layout)
        refuse_others([theirs for theirs, _ in streams], _CALL)
        other = _find_other(streams)
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


def outline_data(dataset: Dataset[Any], samples: list[Any]) -> dict[str, Any]:
    """What a checkpoint's manifest says of the training data. `samples`: what `draw_samples` drew.

    The folds of a cross-validation may have these in common. They differ in `subset`, or in one of the `rows`: of
    tensors in memory, which are looked at in no time, and are the same in each start.
    """
    digest, means = outline_samples(samples)
    facts: dict[str, Any] = {"sha256": digest, "means": means}
    if isinstance(dataset, Subset):
        facts["subset"] = hash_choice(dataset)
    if rows := draw_rows(dataset):
        facts["rows"] = dict(zip(("sha256", "means"), outline_samples(rows), strict=True))
    return facts


def describe_other_data(
    old: dict[str, Any], new: dict[str, Any], dataset: Dataset[Any], num_workers: int
) -> str | None:
    """That the `new` outline is not the `old` one, of a checkpoint; None if it is.

    A data set that gives another sample when it is asked again is not compared.
    """
    name, mine = type(dataset).__name__, (new["sha256"], new["means"])
    if is_alike(mine, (old["sha256"], old["means"])):
        if "subset" in old and "subset" in new and old["subset"] != new["subset"]:
            return f"this {name} has other samples of its data set than the checkpoint's"
        rows = [(one["rows"]["sha256"], one["rows"]["means"]) for one in (old, new) if "rows" in one]
        differ = len(rows) == 2 and not is_alike(*rows)
        return f"this {name} is not the checkpoint's data, some of its samples are others" if differ else None
    if not is_alike(outline_samples(draw_samples(dataset, num_workers)), mine):
        return None
    which = "its first sample" if isinstance(dataset, IterableDataset) else "its first, middle or last sample"
    return f"this {name} is not the checkpoint's data, {which} is another"


def _gather(mine: Any, layout: Layout) -> list[Any]:
    everyones: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyones, mine)
    return everyones


def _find_other(facts: list[Any]) -> int | None:
    """The first rank whose fact is not that of rank 0."""
    return next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
