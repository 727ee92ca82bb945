"""What the ranks of the tests of exact mode run: everything that makes plain DDP depend on the number of ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import hpcddp

SAMPLES, CLASSES = 90, 3


class NoisyImages(Dataset):
    """Images (3, 8, 8) whose augmentation draws random numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        self.classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.dtype = dtype

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.images[index] + 0.1 * torch.randn(3, 8, 8)).to(self.dtype), self.classes[index]


class Sometimes(nn.Module):
    """A layer that a slice uses or not, by what is in it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.detach().sum()) > 0 else x.clone()


def make_net(channels_last: bool, conditional: bool) -> nn.Module:
    """Convolutions, BatchNorm, dropout; more parameters than one bucket of the runs below holds."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16 * 16, 37),
        nn.Tanh(),
        Sometimes(37) if conditional else nn.Identity(),
        nn.Linear(37, CLASSES),
    )
    return net.to(memory_format=torch.channels_last) if channels_last else net


def train_several(arguments: list[dict[str, Any]]) -> None:
    """One training after the other, in the same process."""
    for argument in arguments:
        train(argument)


def train(argument: dict[str, Any]) -> None:
    """An exact run as asked for; its metrics and state are in argument["run_dir"]."""
    dtype = torch.bfloat16 if argument.get("bf16") else torch.float32
    if argument.get("tf32_rank") == int(os.environ["RANK"]):
        torch.set_float32_matmul_precision("high")
    os.environ["HPCDDP_ATTEMPT"] = argument["attempt"]
    with hpcddp.runtime(
        argument.get("global_batch", 24),
        seed=5,
        run_dir=argument["run_dir"],
        save_every=argument.get("save_every"),
        exact=argument.get("exact", "tree"),
        slices=argument.get("slices", 8) if argument.get("exact", "tree") else None,
        parallel=argument.get("parallel"),
    ) as rt:
        conditional = argument.get("conditional", False)
        net = make_net(argument.get("channels_last", False), conditional).to(dtype)
        if argument.get("wrapped_ema"):
            rt.wrap(AveragedModel(net))
        if argument.get("parallel", "ddp") in ("ddp", "zero1"):
            model = rt.wrap(net, bucket_cap_mb=0.01, find_unused_parameters=conditional)
        else:
            model = rt.wrap(net, blocks=(nn.Conv2d, Sometimes), **argument.get("fully_shard", {}))
        loader = rt.loader(NoisyImages(dtype))
        kind = torch.optim.SGD if argument.get("sgd") else torch.optim.AdamW
        kind = getattr(torch.optim, argument.get("optimizer", kind.__name__))
        more: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if argument.get("sgd") else {}
        more |= {"fused": True} if argument.get("fused") else {}
        optimizer = kind(model.parameters(), lr=0.01, **more)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        ema = None
        if argument.get("ema", True):
            with_buffers = argument.get("ema_buffers", False)
            ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=with_buffers)
            objects["ema"] = ema
        rt.track(**objects)
        for _epoch in rt.epochs(argument.get("epochs", 2)):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    with torch.autocast("cpu", torch.bfloat16, enabled=argument.get("amp", False)):
                        loss = cross_entropy(model(x), y)
                    rt.backward(loss)
                if "clip" in argument:
                    nn.utils.clip_grad_norm_(model.parameters(), argument["clip"])
                optimizer.step()
                scheduler.step()
                if ema is not None:
                    ema.update_parameters(net)
                if rt.steps == argument.get("kill_at") and rt.group.rank == argument.get("kill_rank", 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                if rt.steps + 1 == argument.get("stop_at"):
                    rt.stop("the test")


def read_result(run_dir: Path) -> dict[str, Any]:
    """What must be the same: the weights' hash, and every step's loss."""
    losses: dict[int, float] = {}
    for path in sorted(run_dir.glob("attempts/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        losses |= {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    state = json.loads((run_dir / "state.json").read_text())
    return {"weights": state["weights_sha256"], "losses": [losses[step] for step in sorted(losses)]}
