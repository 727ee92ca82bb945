"""The blocks of a model: the modules that FSDP2 gathers one by one."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that comes at least twice, has parts, and has most of the weights.

    Of two classes with the same weights the outer one. A module inside of another one of its class is none. Empty where
    no class comes twice: such a model is gathered in one piece.
    """
    found: dict[type, list[nn.Module]] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if issubclass(kind, _CONTAINERS):
            continue
        blocks = _outermost(model, kind)
        if len(blocks) > 1 and all(next(block.children(), None) is not None for block in blocks):
            found[kind] = blocks
    return max(found.values(), key=lambda blocks: sum(map(_elements, blocks)), default=[])


def guess_behind(model: nn.Module, blocks: list[nn.Module]) -> set[nn.Parameter]:
    """The parameters that stand behind the blocks in the model."""
    if not blocks:
        return set()
    order = list(model.parameters())
    inside = {parameter for block in blocks for parameter in block.parameters()}
    last = max((number for number, parameter in enumerate(order) if parameter in inside), default=len(order))
    return set(order[last + 1 :])


def _outermost(module: nn.Module, kind: type) -> list[nn.Module]:
    if type(module) is kind:
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
