"""The reference trainer: a network learns handwritten digits. A script on hpcddp's public API, and meant to be read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomAffine

import hpcddp
from hpcddp.errors import RequestError, nearest

GLOBAL_BATCH = 64  # where neither an option nor the job says it
_CLASSES = 10


class Digits(Dataset[Any]):
    """Images of 3 x side x side, with their classes."""

    def __init__(self, images: Tensor, classes: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        self.images, self.classes, self.transform = images, classes, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image if self.transform is None else self.transform(image), self.classes[index]


def load_images(side: int) -> tuple[Digits, Digits]:
    """scikit-learn's 1797 digits (UCI optdigits), which it brings along: four fifths to train on, shifted and turned a
    little, and one fifth to test. Compute nodes have no internet, and all ranks would download at once."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = interpolate(images, (side, side), mode="bilinear").sub(0.5).div(0.25).expand(-1, 3, -1, -1)
    classes = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the file's order is by writer
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    shift = RandomAffine(degrees=8, translate=(0.08, 0.08), scale=(0.95, 1.05), fill=-2.0)
    return Digits(images[train], classes[train], shift), Digits(images[test], classes[test])


def make_model(name: str) -> nn.Module:
    """Any torchvision classification model, without pretrained weights. RequestError for a name that is none."""
    known = torchvision.models.list_models(module=torchvision.models)  # without detection, segmentation, video
    if name not in known:
        raise RequestError(
            f"--model {name} is no classification model of torchvision {torchvision.__version__}{nearest(name, known)}",
            'python -c "import torchvision.models as m; print(m.list_models(module=m))"',
        )
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES)
    return model


def train(args: argparse.Namespace, run_dir: str | None) -> None:
    """Train as the options of `hpcddp train` say. `run_dir` None: the job's."""
    with hpcddp.runtime(
        global_batch=args.global_batch,
        seed=args.seed,
        max_micro_batch=args.max_micro_batch,
        parallel=args.parallel,
        run_dir=run_dir,
        save_every=args.save_every,
        exact=args.exact or False,
    ) as rt:
        images, held_out = load_images(args.image_size)
        model = make_model(args.model)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        model, optimizer, scheduler, loader, tests = rt.prepare(
            model,
            optimizer,
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs),
            DataLoader(images, args.global_batch or GLOBAL_BATCH, shuffle=True),
            DataLoader(held_out, 256),
        )
        last_step = rt.steps + args.limit_steps if args.limit_steps else None
        for epoch in rt.epochs(args.epochs):
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                if rt.steps + 1 == last_step:
                    rt.stop("the limit of --limit-steps")
            scheduler.step()
            model.eval()
            with torch.no_grad():
                correct = sum((model(x).argmax(1) == y).sum() for x, y in tests)
            accuracy = float(rt.sum(torch.as_tensor(correct, device=rt.device))) / len(held_out)
            rt.print(f"epoch {epoch}: test accuracy {accuracy:.2%}")
            rt.log(test_acc=accuracy)
