"""Exact mode for a sharded model (FSDP2): the weights of DDP in exact mode, bit for bit.

Torch gathers a block's parameters as ever, but it does not reduce gradients: each rank keeps the whole gradient of its
slices, as of a whole model, and they are summed as there. Weights and the optimizer's state stay shards. A step takes
them one parameter at a time, whole (parallel/zero.py): a kernel may round a shard's last numbers otherwise than those
of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.gradient.exact import ExactGradients, check_layers
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.sharded import ShardedModel, WrapOptions
from hpcddp.training.parallel.tensor import replicate
from hpcddp.training.rendezvous.group import Group

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
            self._model.hand_over(optimizers)

    def check(self, objects: dict[str, Any]) -> None:
        if self._model is not None:
            self._model.check_optimizers(objects)

    def _set_aside(self) -> None:
        self._aside = [(shard, shard.grad) for shard in self._shards if shard.grad is not None]
        for parameter in (*self._shards, *self._parameters):
            parameter.grad = None

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

    def _take_gradients(self) -> list[Tensor]:
        if self._model is not None and not self._shards:
            self._find_parameters(self._model.module)
        return super()._take_gradients()

    def _give(self, index: int, gradient: Tensor) -> None:
        shard: Any = self._shards[index]
        # torch takes no plain tensor beside shards; a norm of this one takes the whole of it
        shard.grad = replicate(gradient, shard.device_mesh)
