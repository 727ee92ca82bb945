"""Writes a small folder of images to try a job with: python make_images.py images

images/train/CLASS/*.png and images/val/CLASS/*.png, as torchvision's ImageFolder reads them. Each class is a pattern
of stripes with noise, so that a model can learn them.
"""

import sys
from pathlib import Path

import torch
from torchvision.transforms.functional import to_pil_image

CLASSES, SIDE = 4, 32


def write_images(folder: Path, per_class: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    across = torch.arange(SIDE).expand(SIDE, SIDE)
    for kind in range(CLASSES):
        stripes = ((across // (kind + 2) % 2).float() + torch.rand(per_class, 3, SIDE, SIDE, generator=noise)) / 2
        (folder / f"stripes{kind + 2}").mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(stripes):
            to_pil_image(image).save(folder / f"stripes{kind + 2}" / f"{number:04d}.png")


if __name__ == "__main__":
    write_images(Path(sys.argv[1], "train"), per_class=64, seed=0)
    write_images(Path(sys.argv[1], "val"), per_class=16, seed=1)
