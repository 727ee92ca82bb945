"""The reference trainer's images.

Nothing is ever downloaded: compute nodes have no internet, and all ranks would download at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from torchvision import datasets, transforms

from hpcddp.errors import RequestError
from hpcddp.training.data.permutation import permute

_MEAN, _SPREAD = (0.5,) * 3, (0.25,) * 3
_FAKE_TRAIN, _FAKE_TEST = 2048, 256


@dataclass(frozen=True, slots=True)
class Images:
    """A data set in two parts of (image, class) pairs; images are float tensors of 3 x side x side."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    side: int

    @property
    def samples(self) -> int:
        """To train on, per epoch."""
        return len(self.train)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; these have it


class _Digits(Dataset[Any]):
    """scikit-learn's 1797 handwritten digits (UCI optdigits, 8 x 8 pixels of 17 grey levels) as PIL images."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = [Image.fromarray((image * 15).astype("uint8")) for image in digits.images]
        self.classes = [int(target) for target in digits.target]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.classes[index]


def load_images(name: str, data_dir: str | None, side: int | None) -> Images:
    """The data set of this name, with light augmentation on its training part.

    `side` is the images' size in pixels; None takes 224 for imagefolder and 32 for the others. Raises RequestError
    where the files are not there.
    """
    side = side or (224 if name == "imagefolder" else 32)
    plain = transforms.Compose(
        [
            transforms.Resize((side, side)),
            transforms.Grayscale(3) if name in {"digits", "mnist"} else transforms.Lambda(_as_rgb),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _SPREAD),
        ]
    )
    if name == "digits":
        shift = transforms.RandomAffine(degrees=8, translate=(0.08, 0.08), scale=(0.95, 1.05))
        return _split_digits(_Digits(transforms.Compose([shift, plain])), _Digits(plain), side)
    if name == "fake":
        shape = (3, side, side)
        return Images(
            datasets.FakeData(_FAKE_TRAIN, shape, 10, plain), datasets.FakeData(_FAKE_TEST, shape, 10, plain), 10, side
        )
    if data_dir is None:
        raise RequestError(f"--dataset {name} needs a folder, and nothing is downloaded", "--data-dir DIR")
    return _load_folder(name, Path(data_dir), plain, side)


def _split_digits(train: _Digits, test: _Digits, side: int) -> Images:
    """Four fifths and one fifth by a fixed shuffle: the file's order goes by writer."""
    order = permute(torch.arange(len(train)), len(train), seed=0, epoch=0).tolist()
    cut = len(order) * 4 // 5
    return Images(Subset(train, order[:cut]), Subset(test, order[cut:]), 10, side)


def _load_folder(name: str, folder: Path, plain: Callable[[Any], Any], side: int) -> Images:
    flip = transforms.Compose([transforms.RandomHorizontalFlip(), plain])
    try:
        if name == "mnist":
            return Images(datasets.MNIST(folder, True, plain), datasets.MNIST(folder, False, plain), 10, side)
        if name == "cifar10":
            return Images(datasets.CIFAR10(folder, True, flip), datasets.CIFAR10(folder, False, plain), 10, side)
        train, test = datasets.ImageFolder(folder / "train", flip), datasets.ImageFolder(folder / "val", plain)
    except (FileNotFoundError, RuntimeError) as error:  # torchvision raises RuntimeError("Dataset not found …")
        wanted = {
            "mnist": "MNIST/raw/train-images-idx3-ubyte and its three neighbours",
            "cifar10": "cifar-10-batches-py/",
            "imagefolder": "train/CLASS/*.jpg and val/CLASS/*.jpg",
        }[name]
        raise RequestError(
            f"--dataset {name}: {folder} does not hold it ({str(error).splitlines()[0]})",
            f"put {wanted} there on a node with internet; nothing is downloaded on a compute node",
        ) from error
    if train.classes != test.classes:  # classes are numbered in each folder by itself
        only = sorted(set(train.classes) ^ set(test.classes))
        raise RequestError(
            f"--dataset imagefolder: {folder} has {', '.join(only[:3])} in only one of train/ and val/",
            "give both the same classes: one folder each, with at least one image",
        )
    return Images(train, test, len(train.classes), side)


def _as_rgb(image: Any) -> Any:
    return image.convert("RGB")
