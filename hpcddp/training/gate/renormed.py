"""Embeddings with `max_norm`: their forward pass changes weights, of the rows that it looks up."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hpcddp.errors import RequestError


def find_renormed(model: nn.Module, ranks: int) -> set[int]:
    """The ids of the weights that this model's forward passes change, each row before its use, and nothing else uses.

    RequestError where several data ranks would each change the rows of their own samples only.
    """
    layers = {name: layer for name, layer in model.named_modules() if _is_renormed(layer)}
    if layers and ranks > 1:
        name, layer = next(iter(layers.items()))
        called = f"{name or 'the model'}, an {type(layer).__name__} with max_norm={layer.max_norm:g}"
        raise RequestError(
            f"{called}, changes the rows that its forward pass looks up, and each rank looks up those of its own"
            " samples: the ranks' weights would differ",
            "max_norm=None, and on every rank, for all rows, before the first step and after each one (if"
            " rt.is_last_micro_batch): with torch.no_grad():"
            f" emb.weight.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})",
        )
    uses = Counter(id(p) for layer in model.modules() for p in layer.parameters(recurse=False))
    return {id(layer.weight) for layer in layers.values() if uses[id(layer.weight)] == 1}


def _is_renormed(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
