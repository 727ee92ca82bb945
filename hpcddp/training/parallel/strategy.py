"""How a model is distributed over the ranks: on one device or several of this rank, whole in DDP, or in shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.sharded import ShardedModel, WrapOptions
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import NO_BUFFER_BROADCAST


def list_accelerators(model: nn.Module) -> tuple[torch.device, ...]:
    """The accelerators that it lies on, in the order of its parameters."""
    places = dict.fromkeys(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return tuple(place for place in places if place.type not in {"cpu", "meta"})


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on this device; one that lies on several accelerators stays there."""
    return model if len(list_accelerators(model)) > 1 else model.to(device)


def check_places(places: Sequence[torch.device], devices: Sequence[torch.device], split: Split, *, exact: bool) -> None:
    """RequestError for a model on several accelerators, if one is not of this rank's devices, or if it is not DDP's."""
    if len(places) < 2:
        return
    lies = f"the model lies on {' and '.join(map(str, places))}"
    if not set(places) <= set(devices):
        raise RequestError(
            f"{lies}, and this rank has {' and '.join(map(str, devices))}",
            "rt.devices for its parts, and gpus_per_rank in the job file for how many there are",
        )
    if exact or split.kind != "ddp" or split.tensor > 1:
        what = "exact mode" if exact else f"parallel {split.kind}"
        raise RequestError(f"{lies}, and {what} takes a model on one", 'hpcddp.runtime(parallel="ddp")')


def split_model(
    model: nn.Module, group: Group, layout: Layout, split: Split, wanted: WrapOptions
) -> DistributedDataParallel | ShardedModel:
    """The model on the group's device, or on several of the rank's, over the ranks: in shards, or in torch's DDP, whose
    buffers are not broadcast at each forward pass, unless options say so. A collective."""
    if split.is_sharded:
        return ShardedModel(model, group, layout, split, wanted)
    model, device = place(model, group.device), group.device
    defaults: dict[str, Any] = {**NO_BUFFER_BROADCAST, "gradient_as_bucket_view": True}
    if device.type == "cuda" and len(list_accelerators(model)) < 2:  # DDP takes no list for a model on several
        defaults["device_ids"] = [device.index]
    return DistributedDataParallel(model, **(defaults | wanted.options))
