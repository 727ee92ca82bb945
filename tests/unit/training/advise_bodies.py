"""What the ranks of test_advised_memory.py run: a few training steps, with every tensor's bytes counted."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention and a network of width 4 x hidden."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, hidden: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(Block(hidden, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.recompute = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm_2(self.conv_2(torch.relu(self.norm_1(self.conv_1(x))))))


class Convolutions(nn.Module):
    """Like a ResNet: each of three parts has half the pixels and twice the channels."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for part in range(3):
            if part:
                parts.append(nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False))
                channels *= 2
            parts += [Residual(channels) for _ in range(blocks)]
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x).mean((2, 3)))


MODELS = {"transformer": Transformer, "convolutions": Convolutions}


class Live(TorchDispatchMode):
    """The bytes of every storage that is alive, and the most since `peak` was set. FSDP empties storages in place."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        def resize(storage: Any, size: int) -> Any:
            self._resize(storage, size)
            self._note(storage)
            return storage

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:

            def gone(_: Any) -> None:
                self.now -= self._sizes.pop(key)
                del self._known[key]

            self._known[key] = weakref.ref(storage, gone)
            self._sizes[key] = 0
        self.now += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "from_local") for kind in types):
            return NotImplemented  # a DTensor: its operators on local tensors come next
        output = func(*args, **(kwargs or {}))
        for found in tree_leaves(output):
            if isinstance(found, Tensor):
                self._note(found.untyped_storage())
        return output


def train(cases: list[dict[str, Any]]) -> None:
    """Write each case's largest number of bytes, of its third step, to `out`. Rank 0's."""
    dist.init_process_group("gloo")
    peaks = [measure(case) for case in cases]
    if dist.get_rank() == 0:
        Path(os.environ["ADVISE_OUT"]).write_text(json.dumps(peaks))
    dist.destroy_process_group()


def measure(case: dict[str, Any]) -> int:
    torch.manual_seed(0)
    gc.collect()
    live = Live()
    with live:
        model = MODELS[case["model"]](**case["sizes"])
        if case["precision"] == "bf16":
            model = model.to(torch.bfloat16)
        model.recompute = case.get("recompute", False)
        wrapped = split(model, case["split"], case["precision"])
        optimizer = make_optimizer(wrapped, case)
        batch = make_batch(case)
        for _ in range(3):
            gc.collect()
            live.peak = live.now
            for _ in range(case.get("passes", 1)):
                loss_of(wrapped, batch, case).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def split(model: nn.Module, how: str, precision: str) -> nn.Module:
    world_size = dist.get_world_size()
    if how in ("ddp", "zero1"):
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else model
    shape, names = {
        "fsdp": ((world_size,), ("shard",)),
        "hsdp": ((world_size // 2, 2), ("replicate", "shard")),
        "tensor": ((world_size // 2, 2), ("shard", "tensor")),
    }[how]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if how == "tensor":
        divide(model, mesh["tensor"])
        if world_size == 2:
            return model
        mesh = mesh["shard"]
    options: dict[str, Any] = {"mesh": mesh}
    if precision == "bf16-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, (Block, Residual)):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def divide(model: nn.Module, mesh: Any) -> None:
    """Megatron's plan. (Which columns are queries and which are keys does not matter for memory.)"""
    across = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for module in model.modules():
        if isinstance(module, Block):
            module.heads //= mesh.size()
            parallelize_module(module, mesh, across)


def make_optimizer(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    if case["optimizer"] == "adamw":
        kind, options = torch.optim.AdamW, {"lr": 1e-3, "foreach": case.get("foreach", False)}
    else:
        kind, options = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": case.get("foreach", False)}
    if case["split"] == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    return kind(model.parameters(), **options)


def make_batch(case: dict[str, Any]) -> Tensor:
    if case["model"] == "transformer":
        sizes = case["sizes"]
        return torch.randint(sizes["vocabulary"], (case["micro_batch"], sizes["tokens"]))
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    return torch.randn(case["micro_batch"], 3, 32, 32, dtype=dtype)


def loss_of(model: nn.Module, batch: Tensor, case: dict[str, Any]) -> Tensor:
    autocast = case["precision"] == "bf16-mixed" and case["split"] in ("ddp", "zero1")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(batch).flatten(0, -2)
        labels = batch.flatten() if case["model"] == "transformer" else torch.zeros(len(output), dtype=torch.long)
        return cross_entropy(output.float(), labels)
