"""What exact mode costs: seconds per optimizer step against plain DDP, in the same processes, in turn.

ResNet-18 (11.7 M parameters) on noise, SGD with momentum, the same global batch in every way. For each number of ranks
W: plain DDP, exact with K = W slices (what the ordered sum alone costs) and with K = 8 (what small micro batches cost
on top), both by tree, and by integers. Each round runs all of them in turn, a few steps each, and compares their
fastest steps: what other work on the machine adds is never negative. The median over the rounds is told. On GPUs,
W > 1 shares the device over gloo, and W = 1 is NCCL's.
Usage: exact.py [--worlds 1 2 4] [--rounds N] [--batch G] [--side PIXELS] [--check]; --check exits 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 5, 2
TARGET = 1.15  # of plain DDP, by tree at K = W
SLICES = 8
WORDS = {"tree": "tree", "integer": "integers"}


def ways(world_size: int) -> dict[str, dict[str, Any]]:
    """What is compared, by name; plain DDP first."""
    found: dict[str, dict[str, Any]] = {"plain DDP": {}}
    for method in ("tree", "integer"):
        for slices in sorted({world_size, SLICES}):
            found[f"exact, {WORDS[method]}, K={slices}"] = {"exact": method, "slices": slices}
    return found


def time_steps(group: Any, options: dict[str, Any], batch: int, side: int) -> list[float]:
    """Seconds of each optimizer step after the warm-up."""
    import torch
    import torchvision
    from torch.utils.data import TensorDataset

    import hpcddp

    data = TensorDataset(torch.randn(batch, 3, side, side), torch.randint(10, (batch,)))
    steps = []
    with contextlib.redirect_stderr(io.StringIO()), hpcddp.runtime(batch, seed=1, group=group, **options) as rt:
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = rt.loader(data)
        model, optimizer = rt.prepare(model, optimizer)
        began = time.perf_counter()
        for _ in rt.epochs(WARM_UP + STEPS):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                if rt.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.perf_counter()
                steps.append(now - began)
                began = now
        del model
    return steps[WARM_UP:]


def run_rank(args: argparse.Namespace) -> None:
    """One of W ranks; rank 0 writes {way: fastest step of each round, in seconds}."""
    import torch

    import hpcddp

    size = int(os.environ["WORLD_SIZE"])
    backend = "gloo" if size > 1 or not torch.cuda.is_available() else "nccl"
    times: dict[str, list[float]] = {name: [] for name in ways(size)}
    with hpcddp.init(backend=backend) as group:
        for turn in range(args.rounds):
            names = list(times)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(min(time_steps(group, ways(size)[name], args.batch, args.side)))
        if group.is_first:
            where = torch.cuda.get_device_name() if group.device.type == "cuda" else "CPU"
            Path(args.rank_out).write_text(json.dumps({"times": times, "where": f"{where}, {backend}"}))


def run_world(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start `size` ranks of this file, one thread each, and read what rank 0 measured."""
    with tempfile.NamedTemporaryFile("r") as out:
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
        place["MASTER_PORT"] = random.randrange(12000, 32000)
        words = [sys.executable, __file__, "--rank-out", out.name, "--rounds", args.rounds, "--batch", args.batch]
        ranks = [
            subprocess.Popen(
                [*map(str, words), "--side", str(args.side)],
                env={**os.environ, **{k: str(v) for k, v in place.items()}, "RANK": str(r), "LOCAL_RANK": str(r)},
                stderr=subprocess.DEVNULL if r else None,
            )
            for r in range(size)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise SystemExit(f"a rank of {size} failed")
        measured: dict[str, Any] = json.load(out)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank-out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_out:
        run_rank(args)
        return 0
    missed = False
    for size in args.worlds:
        measured = run_world(size, args)
        plain = measured["times"]["plain DDP"]
        print(f"\n{size} ranks, {measured['where']}, load {os.getloadavg()[0]:.1f}")
        for name, seconds in measured["times"].items():
            ratio = statistics.median(mine / theirs for mine, theirs in zip(seconds, plain, strict=True))
            late = name == f"exact, tree, K={size}" and ratio > TARGET
            missed |= late
            more = f"  over the target of {TARGET}" if late else ""
            print(f"  {name:24} {statistics.median(seconds) * 1e3:8.1f} ms  {ratio:5.2f}x{more}")
    return int(missed and args.check)


if __name__ == "__main__":
    sys.exit(main())
