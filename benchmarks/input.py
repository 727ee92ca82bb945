"""What the loader of hpcddp costs over a hand-tuned DataLoader, on a folder of JPEG images that is made first.

Both read, decode, crop at random and flip the same files, with the same number of loader processes that stay, and with
pinned memory and copies beside the computation where there is a GPU. They take turns, one epoch each, in an order that
changes; the ratio of each round is taken before the median. The model is nearly nothing, so that input is all there is.
Needs torchvision and Pillow. Usage: input.py [--images N] [--workers N] [--rounds N] [--check]; --check exits 1 when
the target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 1.02  # of the time of a hand-tuned DataLoader
BATCH = 32
HAND, OURS = "by hand", "hpcddp"

Epochs = Iterator[None]  # each `next` is one epoch


def make_images(folder: Path, count: int, side: int) -> None:
    """`count` JPEG images of `side` x `side` pixels in 4 classes: coarse noise on a gradient."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    slope = numpy.linspace(0, 180, side)[:, None, None]
    for n in range(count):
        at = folder / f"class{n % 4}"
        at.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 75, (-(-side // 8), -(-side // 8), 3)).repeat(8, 0).repeat(8, 1)[:side, :side]
        Image.fromarray((slope + coarse).astype("uint8")).save(at / f"{n:06d}.jpg", quality=90)


def make_parts(folder: Path, crop: int, workers: int, device: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer and a hand-tuned DataLoader."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    data = datasets.ImageFolder(str(folder), transforms.Compose(steps))
    tuned = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", **tuned)
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def by_hand(folder: Path, crop: int, workers: int, device: Any) -> Epochs:
    from torch.nn.functional import cross_entropy

    model, optimizer, loader = make_parts(folder, crop, workers, device)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            inputs, classes = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            cross_entropy(model(inputs), classes).backward()
            optimizer.step()
        yield


def with_hpcddp(folder: Path, crop: int, workers: int, device: Any, run: str, count: int) -> Epochs:
    from torch.nn.functional import cross_entropy

    import hpcddp

    model, optimizer, loader = make_parts(folder, crop, workers, device)
    with hpcddp.runtime(run_dir=run, save_every=sys.maxsize) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        for _ in rt.epochs(count):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
            yield


def measure(epochs: dict[str, Epochs], rounds: int) -> dict[str, list[float]]:
    """{who: seconds of one epoch, of each round}, after one epoch that starts the workers."""
    import torch

    for one in epochs.values():
        next(one)
    times: dict[str, list[float]] = {name: [] for name in epochs}
    for turn in range(rounds):
        for name in list(epochs)[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            next(epochs[name])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=400, help="pixels of the files")
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--workers", type=int, default=min(8, max(1, cpus - 1)))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit 1 if the target is missed")
    args = parser.parse_args()
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as made:
        images = Path(made) / "images"
        make_images(images, args.images, args.side)
        how = (images, args.crop, args.workers, device)
        epochs = {HAND: by_hand(*how), OURS: with_hpcddp(*how, str(Path(made) / "run"), args.rounds + 1)}
        times = measure(epochs, args.rounds)
        next(epochs[OURS], None)  # it ends its run
    ratio = statistics.median(ours / hand for hand, ours in zip(times[HAND], times[OURS], strict=True))
    print(f"{args.images} images, {args.workers} workers, {device.type}, load {os.getloadavg()[0]:.1f}")
    for name, seconds in times.items():
        print(f"{name:8} {args.images / statistics.median(seconds):8.0f} images/s")
    print(f"ratio    {ratio:8.3f}   (median of {args.rounds} rounds; target: at most {TARGET})")
    return 1 if args.check and ratio > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
