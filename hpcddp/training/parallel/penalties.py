"""Penalties on parameters in the loss of a pipeline: the last stage computes it, and has its own parameters only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hpcddp.training.torch_graph import Node, is_single, leaf_of, list_inputs


class _Below(NamedTuple):
    """What a node of the graph is computed from."""

    has_data: bool  # of the batch, by the model's output or by what came from the stage before
    parameter: int | None  # the id of one with several numbers


def find_penalty(loss: Tensor, outputs: Iterable[Tensor], data: Iterable[Tensor], model: nn.Module) -> str | None:
    """The name of a parameter of which the loss takes one number that was computed from parameters alone.

    `data` are leaves of the graph that hold something of the batch.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.numel() > 1}
    ends = {tensor.grad_fn for tensor in outputs}
    leaves = {id(tensor) for tensor in data}
    below: dict[Node, _Below] = {}
    for node in _list_from_leaves(loss.grad_fn, ends):
        leaf = leaf_of(node)
        inputs = [] if node in ends else list_inputs(node)
        found = [below[earlier].parameter for earlier in inputs]
        below[node] = _Below(
            node in ends or id(leaf) in leaves or any(below[earlier].has_data for earlier in inputs),
            id(leaf) if id(leaf) in names else next((number for number in found if number is not None), None),
        )
        for earlier in inputs if below[node].has_data else ():
            part = below[earlier]
            if not part.has_data and part.parameter is not None and is_single(earlier):
                return names[part.parameter]
    return None


def _list_from_leaves(last: Node | None, ends: set[Node | None]) -> Sequence[Node]:
    """The nodes from which `last` was computed, each behind what it takes; not beyond the `ends`."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [] if last is None else [(last, False)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node not in ends:
                waiting.extend((earlier, False) for earlier in list_inputs(node))
    return order
