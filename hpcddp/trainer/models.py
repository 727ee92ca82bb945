"""Any torchvision classification model by name, without pretrained weights."""

from __future__ import annotations

import torchvision
from torch import nn

from hpcddp.errors import RequestError, nearest


def make_model(name: str, classes: int, side: int) -> nn.Module:
    """The model with `classes` outputs for images of `side` pixels; an unknown name is a RequestError."""
    check_model(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in {"googlenet", "inception_v3"}:
        options |= {"aux_logits": False, "init_weights": True}  # a second output would need a second loss
    if name.startswith("vit_"):
        options["image_size"] = side  # its position embedding has a fixed length
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def check_model(name: str) -> None:
    """RequestError for a name that is no model's."""
    known = torchvision.models.list_models(module=torchvision.models)  # without detection, segmentation, video
    if name not in known:
        raise RequestError(
            f"--model {name} is no classification model of torchvision {torchvision.__version__}{nearest(name, known)}",
            'python -c "import torchvision.models as m; print(m.list_models(module=m))"',
        )
