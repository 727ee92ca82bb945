"""Where a model lies: on the device of its rank, or, if its script has put parts of it there, on several of the rank's.

The forward pass of a model on several devices moves what goes from part to part; DDP averages each part's gradients
where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split


def list_accelerators(model: nn.Module) -> tuple[torch.device, ...]:
    """The accelerators that it lies on, in the order of its parameters."""
    places = dict.fromkeys(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return tuple(place for place in places if place.type not in {"cpu", "meta"})


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on this device; one that lies on several accelerators stays there."""
    return model if len(list_accelerators(model)) > 1 else model.to(device)


def check_places(places: Iterable[torch.device], own: Sequence[torch.device], split: Split, *, exact: bool) -> None:
    """RequestError for a model on several accelerators, if one is not this rank's `own`, or for what takes a model on
    one only."""
    several = list(places)
    if len(several) < 2:
        return
    lies = f"the model lies on {' and '.join(map(str, several))}"
    if not set(several) <= set(own):
        raise RequestError(
            f"{lies}, and this rank has {' and '.join(map(str, own))}",
            "rt.devices for its parts, and gpus_per_rank in the job file for how many there are",
        )
    for what, is_asked in (
        (f"parallel {split.kind}", split.kind != "ddp" or split.tensor > 1),
        ("exact mode", exact),
    ):
        if is_asked:
            raise RequestError(f"{lies}, and {what} takes a model on one", 'hpcddp.runtime(parallel="ddp")')
