"""What a training loop adds to each step: hand-written DDP, hpcddp, Fabric and Accelerate in one process group.

A small network on 64 samples per global batch, so that a step takes 1 to 2 ms and what a loop adds shows. Every rank
holds all four side by side. They run in turn, a block of steps each, round after round, in an order that changes.
What each block takes per step is compared with the hand-written block of the same round; medians over the rounds are
told, in time and in CPU time of rank 0 (all its threads), which other work on the machine disturbs less.
hpcddp writes metrics into a run folder, exchanges the stop flags and keeps its order of samples, as always; the others
do none of it. Fabric and Accelerate come from PyPI, as for benchmarks/lines/peers.py; without them they are left out.
Usage: loop.py [--worlds 1 2] [--rounds N] [--steps N] [--check]; --check exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
PEERS = REPO / "benchmarks/lines"
BATCH = 64  # samples of a global batch
TARGET_MS = {1: 0.1, 2: 0.2}  # over hand-written DDP, by number of ranks
HAND, OURS = "by hand", "hpcddp"

Blocks = Iterator[None]  # each `next` makes one block of steps, the last one ends the training


def make_parts(steps: int) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, data set and loss, the same for all."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(torch.randn(BATCH * steps, 256), torch.randint(10, (BATCH * steps,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data, nn.functional.cross_entropy


def by_hand(group: Any, blocks: int, steps: int, _folder: str) -> Blocks:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model, optimizer, data, loss_fn = make_parts(steps)
    sampler = DistributedSampler(data, group.world_size, group.rank)
    loader = DataLoader(data, BATCH // group.world_size, sampler=sampler)
    if group.world_size > 1:
        model = DistributedDataParallel(model)
    for epoch in range(blocks):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        yield


def with_hpcddp(group: Any, blocks: int, steps: int, folder: str) -> Blocks:
    from torch.utils.data import DataLoader

    import hpcddp

    model, optimizer, data, loss_fn = make_parts(steps)
    loader = DataLoader(data, BATCH, shuffle=True)
    with hpcddp.runtime(group=group, run_dir=folder, save_every=sys.maxsize) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        for _ in rt.epochs(blocks):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(loss_fn(model(x), y))
                optimizer.step()
            yield


def with_fabric(group: Any, blocks: int, steps: int, _folder: str) -> Blocks:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader

    model, optimizer, data, loss_fn = make_parts(steps)
    strategy = "ddp" if group.world_size > 1 else "auto"
    plugins = [TorchElasticEnvironment()]
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=group.world_size, plugins=plugins)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH // group.world_size, shuffle=True))
    for _ in range(blocks):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(loss_fn(model(x), y))
            optimizer.step()
        yield


def with_accelerate(group: Any, blocks: int, steps: int, _folder: str) -> Blocks:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    model, optimizer, data, loss_fn = make_parts(steps)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, BATCH // group.world_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(blocks):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
        yield


LOOPS: dict[str, Callable[[Any, int, int, str], Blocks]] = {
    HAND: by_hand,
    OURS: with_hpcddp,
    "Fabric": with_fabric,
    "Accelerate": with_accelerate,
}


def run_rank(args: argparse.Namespace) -> None:
    """One of W ranks; rank 0 writes {loop: [[seconds, CPU seconds] per step, of each round]}."""
    import torch.distributed as dist

    import hpcddp

    times: dict[str, list[tuple[float, float]]] = {}
    with hpcddp.init(backend="gloo") as group, tempfile.TemporaryDirectory() as mine:
        folder = str(Path(args.rank_out).parent / "run") if group.is_first else mine
        running = {name: LOOPS[name](group, args.rounds + 1, args.steps, folder) for name in args.loops}
        for name, blocks in running.items():
            next(blocks)  # warm-up
            times[name] = []
        for turn in range(args.rounds):
            names = list(times)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if group.world_size > 1:
                    dist.barrier()
                began, began_cpu = time.perf_counter(), time.process_time()
                next(running[name])
                took = time.perf_counter() - began, time.process_time() - began_cpu
                times[name].append((took[0] / args.steps, took[1] / args.steps))
        for blocks in running.values():
            next(blocks, None)
        if group.is_first:
            Path(args.rank_out).write_text(json.dumps(times))


def run_world(size: int, python: str, loops: list[str], args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Start `size` ranks of this file, one thread each, and read what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times"
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
        place["PYTHONPATH"] = REPO
        place["MASTER_PORT"] = random.randrange(12000, 32000)
        words = [python, __file__, "--rank-out", out, "--rounds", args.rounds, "--steps", args.steps, "--loops", *loops]
        ranks = [
            subprocess.Popen(
                [*map(str, words)],
                env={**os.environ, **{k: str(v) for k, v in place.items()}, "RANK": str(r), "LOCAL_RANK": str(r)},
                stderr=None if args.verbose and not r else subprocess.DEVNULL,
            )
            for r in range(size)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise SystemExit(f"a rank of {size} failed; --verbose shows its messages")
        measured: dict[str, list[list[float]]] = json.loads(Path(out).read_text())
    return measured


def show(size: int, measured: dict[str, list[list[float]]]) -> bool:
    """Print the table of a world; returns whether hpcddp missed the target."""
    print(f"\n{size} {'rank' if size == 1 else 'ranks'}, load {os.getloadavg()[0]:.1f}; per step, medians")
    print(f"{'':12}{'ms':>9}{'over by hand':>14}{'ratio':>8}{'CPU ms':>10}{'over by hand':>14}{'ratio':>8}")
    missed = False
    for name, rounds in measured.items():
        numbers = []
        for kind in (0, 1):
            pairs = [(mine[kind] * 1e3, hand[kind] * 1e3) for mine, hand in zip(rounds, measured[HAND], strict=True)]
            numbers += [
                statistics.median(mine for mine, _ in pairs),
                statistics.median(mine - hand for mine, hand in pairs),
                statistics.median(mine / hand for mine, hand in pairs),
            ]
        ms, over, ratio, cpu_ms, cpu_over, cpu_ratio = numbers
        outcome = ""
        if name == OURS and size in TARGET_MS:
            missed = over > TARGET_MS[size]
            outcome = f"  {'MISSED' if missed else 'ok'} (target {TARGET_MS[size]} ms over)"
        print(f"{name:12}{ms:9.3f}{over:14.3f}{ratio:8.2f}{cpu_ms:10.3f}{cpu_over:14.3f}{cpu_ratio:8.2f}{outcome}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="steps of a block")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--verbose", action="store_true", help="show what rank 0 says")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank-out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_out:
        run_rank(args)
        return 0
    python, loops = sys.executable, [HAND, *(name for name in args.loops if name != HAND)]
    if {"Fabric", "Accelerate"} & {*loops}:
        sys.path.insert(0, str(PEERS))
        from peers import VENV, install

        try:
            install()
            python = str(VENV / "bin/python")
        except subprocess.CalledProcessError as error:
            print(f"Fabric and Accelerate are left out: {error}", file=sys.stderr)
            loops = [name for name in loops if name in (HAND, OURS)]
    missed = [show(size, run_world(size, python, loops, args)) for size in args.worlds]
    return 1 if args.check and any(missed) else 0


if __name__ == "__main__":
    sys.exit(main())
