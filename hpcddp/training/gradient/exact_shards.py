"""Exact mode for a sharded model (FSDP2): the weights of DDP in exact mode, bit for bit.

Torch gathers a block's parameters as ever, but it does not reduce gradients: each rank keeps the whole gradient of its
slices, as under DDP, and they are summed as there. Weights and the optimizer's state stay shards. A step takes them one
parameter at a time, whole (parallel/zero.py): a kernel may round a shard's last numbers otherwise than those of
the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.exact import TWICE, ExactGradients, check_layers
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.sharded import ShardedModel, WrapOptions, check_optimizers, hand_over
from hpcddp.training.parallel.tensor import replicate
from hpcddp.training.rendezvous.group import Group

_AT_ONCE = 1 << 22  # numbers that are summed in one exchange
_OPTIONS = {"reshard_after_forward"}  # of fully_shard: those that change no number
_DDP = 'hpcddp.runtime(parallel="ddp", exact=…)'


class ExactShards(ExactGradients):
    """The sum over a plan's fixed slices, for one sharded model on several data ranks."""

    forward_is_collective = True

    def __init__(self, group: Group, layout: Layout, split: Split, slices: int, method: str) -> None:
        super().__init__(group, layout, slices, method)
        if slices % layout.data_size:
            more = -(-slices // layout.data_size) * layout.data_size
            raise RequestError(
                f"{slices} slices are not as many for each of {layout.data_size} ranks, and in parallel {split.kind}"
                " all ranks call the model equally often",
                f"slices={more}, from the first run on: their number is part of the result; or {_DDP}",
            )
        self._group = group
        self._split = split
        self._model: ShardedModel | None = None
        self._shards: list[nn.Parameter] = []  # the model's; `_parameters` are the same ones, whole, in a pass
        self._is_summed = False  # whether this step's gradients are

    def wrap(self, model: nn.Module, wanted: WrapOptions) -> nn.Module:
        """The model in shards, in place."""
        check_layers(model)
        if self._model is not None or isinstance(model, AveragedModel):
            what = "averaged weights" if isinstance(model, AveragedModel) else "a second model"
            raise RequestError(f"exact mode in parallel {self._split.kind} takes one model, not {what} beside it", _DDP)
        for option in wanted.options.keys() - _OPTIONS:
            raise RequestError(
                f"exact mode in parallel {self._split.kind} does not take {option}: one rank would compute otherwise",
                f"leave {option} out",
            )
        self._model = ShardedModel(model, self._group, self._layout, self._split, wanted)
        sharded: Any = model  # `fully_shard` has given it its methods
        sharded.set_requires_gradient_sync(False)
        self._models.append(model)
        self._buffers.watch(model)
        return model

    def hand_over(self, optimizers: Iterable[Optimizer]) -> None:
        if self._model is not None:
            hand_over(optimizers, self._model.module, self._model.replaced)

    def check(self, objects: dict[str, Any]) -> None:
        if self._model is not None:
            check_optimizers(objects, self._model.replaced)

    @contextmanager
    def micro(self, micro: MicroBatch) -> Iterator[None]:
        if micro.nth == 0:
            self._is_summed = False
        with super().micro(micro):
            yield

    def _set_aside(self, held: Iterable[nn.Parameter]) -> None:
        super()._set_aside(self._shards)
        for parameter in held:
            parameter.grad = None

    def backward_ends(self, micro: MicroBatch) -> None:
        """Behind the last slice's: the sum, for the script to clip."""
        if micro.last:
            if self._is_summed:
                raise RequestError(*TWICE)
            self._sum_shards(self._take(micro))

    def collect(self, micro: MicroBatch) -> None:
        self._buffers.end_slice(micro)
        if not micro.last:
            self._sum.add(self._take(micro))
        elif not self._is_summed:  # the script has called loss.backward() itself
            self._sum_shards(self._take(micro))

    def _find_parameters(self, model: nn.Module) -> None:
        """The parameters as torch makes them for a pass: it keeps these objects, and their gradients, for good.

        A collective. Only behind a first pass, with which torch sets itself up.
        """
        from torch.distributed.fsdp import FSDPModule

        whole: dict[str, nn.Parameter] = {}
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.unshard()
            whole |= {name: p for name, p in model.named_parameters() if not hasattr(p, "device_mesh")}
            unit.reshard()
        for name, shard in model.named_parameters():
            if shard.requires_grad:
                self._shards.append(shard)
                self._parameters.append(whole[name])

    def _take(self, micro: MicroBatch) -> list[Tensor]:
        """This slice's gradients; zeros where it has no samples, and only keeps the ranks in step."""
        if self._model is not None and not self._shards:
            self._find_parameters(self._model.module)
        taken = self._take_gradients()
        return [torch.zeros_like(gradient) for gradient in taken] if micro.samples == 0 else taken

    def _sum_shards(self, last: list[Tensor]) -> None:
        """Give each parameter the whole gradient of the global batch, if any slice of any rank has one for it."""
        used = torch.zeros(len(last), dtype=torch.int64, device=self._device)
        used[sorted(self._used)] = 1
        total = self._reducer.sum_integers(used).tolist()
        for indices in _group_alike(last, [nth for nth, count in enumerate(total) if count]):
            sizes = [last[index].numel() for index in indices]
            flat = torch.cat([last[index].reshape(-1) for index in indices])
            views = [part.view_as(last[i]) for part, i in zip(torch.split(flat, sizes), indices, strict=True)]
            flat = self._sum.total(indices, views, flat)
            for index, part in zip(indices, torch.split(flat, sizes), strict=True):
                shard: Any = self._shards[index]
                # torch takes no plain tensor beside shards; a norm of this one takes the whole of it
                shard.grad = replicate(part.view(shard.shape), shard.device_mesh)
        self._sum.clear()
        self._is_summed = True


def _group_alike(tensors: list[Tensor], indices: list[int]) -> Iterator[list[int]]:
    """The indices in turn, in groups of one type and not too many numbers."""
    group: list[int] = []
    for index in indices:
        tensor = tensors[index]
        held = sum(tensors[other].numel() for other in group)
        if group and (tensors[group[0]].dtype != tensor.dtype or held + tensor.numel() > _AT_ONCE):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
