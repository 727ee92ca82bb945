"""Fingerprints: equal where the numbers are, and only there."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpcddp.training.checkpoint.tracked import hash_states
from hpcddp.training.torch_compat import destroy_process_group


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, bias=False))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, which DDP wants."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


def test_the_stream_is_a_header_and_the_bytes_of_each_tensor_in_the_order_of_names() -> None:
    model = nn.Module()
    model.register_buffer("count", torch.tensor(7))
    model.weight = nn.Parameter(torch.tensor([[1.5, -0.0]]))
    parts = [
        b'["m.count", "torch.int64", []]\n' + np.int64(7).tobytes(),
        b'["m.weight", "torch.float32", [1, 2]]\n' + np.array([1.5, -0.0], np.float32).tobytes(),
    ]
    assert hash_states({"m": model}) == hashlib.sha256(b"".join(parts)).hexdigest()


CHANGES: dict[str, Callable[[Any], object]] = {
    "one ulp": lambda model: model[2].weight.data[1, 2, 0, 0].nextafter_(torch.tensor(9.0)),
    "a buffer": lambda model: model[1].running_mean[3].add_(1),
    "a count": lambda model: model[1].num_batches_tracked.add_(1),
    "a shape": lambda model: setattr(model[2], "weight", nn.Parameter(model[2].weight.detach().reshape(4, 2, 3, 3))),
    "a dtype": lambda model: setattr(model[1], "running_mean", model[1].running_mean.view(torch.int32)),
    "a name": lambda model: model._modules.update({"3": model._modules.pop("2")}),
    "the sign of a zero": lambda model: model[1].running_mean[0].neg_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_changes_the_hash(name: str) -> None:
    model = small_model()
    before = hash_states({"model": model})
    assert hash_states({"model": copy.deepcopy(model)}) == before
    CHANGES[name](model)
    assert hash_states({"model": model}) != before


def test_objects_and_parameters_are_told_apart_by_name() -> None:
    one, other = small_model(), small_model()
    CHANGES["one ulp"](other)
    both = hash_states({"model": one, "ema": other})
    assert both == hash_states({"ema": other, "model": one})
    assert both != hash_states({"model": other, "ema": one})
    assert both != hash_states({"model": one})


def test_memory_formats_and_views_hash_as_what_they_hold() -> None:
    model = small_model()
    before = hash_states({"model": model})
    assert not model.to(memory_format=torch.channels_last)[0].weight.is_contiguous()
    assert hash_states({"model": model}) == before
    wide = torch.zeros(4, 2)
    wide[:, 0] = model[0].bias.detach()
    model[0].bias = nn.Parameter(wide[:, 0])
    assert hash_states({"model": model}) == before


@pytest.mark.usefixtures("alone")
def test_a_ddp_wrapper_makes_no_difference_also_inside_an_average() -> None:
    bare = small_model()
    wrapped = DistributedDataParallel(small_model())
    assert hash_states({"model": wrapped}) == hash_states({"model": bare})
    assert hash_states({"ema": AveragedModel(wrapped)}) == hash_states({"ema": AveragedModel(bare)})
    parts = nn.ModuleDict({"a": DistributedDataParallel(small_model()), "b": small_model()})
    assert hash_states({"gan": parts}) == hash_states({"gan": nn.ModuleDict({"a": bare, "b": bare})})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_no_difference() -> None:
    model = small_model()
    before = hash_states({"model": model})
    assert hash_states({"model": model.cuda()}) == before
