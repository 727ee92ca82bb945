"""Whether the weights are numbers, and the same on all data ranks.

Where they are not the same, the training is wrong, and nothing else shows it. Where one is NaN or infinite, each step
that follows is lost, and a checkpoint would take the place of the last good one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.parallel.layout import Layout

_CHECKED_FIRST = 2  # steps of an attempt; a model that the ranks train each on its own differs after one
# Other hardware or another number of threads may round each step otherwise: by so many units in the last place of the
# largest weight, in each step. A mistake moves the weights by more.
_ROUNDINGS = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameWeights:
    """When weights are looked at: before checkpoints, at the end, and, as for the ranks' being alike, after the first
    steps of an attempt. `others` are models that are prepared and not trained, such as averages and teachers."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        layout: Layout,
        device: torch.device,
        others: Callable[[], Sequence[nn.Module]] = tuple,
    ) -> None:
        self._models = models  # may still get more
        self._others = others
        self._layout = layout
        self._device = device
        self._first = 0
        self._checked_at: int | None = None

    def check_first(self, step: int) -> None:
        """After each step: compares in the first ones only. See `check_same_weights`."""
        if self._first < _CHECKED_FIRST:
            self._first += 1
            self._compare(step)

    def check(self, step: int) -> None:
        """See `check_numbers` and `check_same_weights`. Nothing if that was done at this step."""
        if self._checked_at != step:
            self._checked_at = step
            check_numbers(self._models, self._layout, step)
            self._compare(step)

    def _compare(self, step: int) -> None:
        check_same_weights(_list_weights(self._models, self._others()), self._layout, self._device, step)


def check_numbers(models: Sequence[nn.Module], layout: Layout, step: int) -> None:
    """RequestError, on every rank, if a weight that is trained is NaN or infinite on one of them. A collective."""
    named = [
        (f"{name} of {type(model).__name__}", _local(parameter))
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    ]
    # not one sum for all: each tensor may be on a device of its own
    lost = next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
    found: list[str | None] = [lost]
    if layout.world_size > 1:
        found = [None] * layout.world_size
        dist.all_gather_object(found, lost)
    first = next(filter(None, found), None)
    if first is not None:
        raise RequestError(
            f"after step {step} the weights are no numbers any more: {first} has NaN or infinity. No checkpoint is"
            " written of them",
            "continue from the checkpoint before with a smaller learning rate, or bound each step:"
            " rt.step(optimizer, clip_norm=1.0)",
        )


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter that is divided among ranks, a DTensor; else all of it."""
    tensor: Tensor = getattr(parameter, "to_local", lambda: parameter)()
    return tensor.detach()


class _Weight(NamedTuple):
    """A parameter that is whole on this rank."""

    name: str
    tensor: Tensor
    is_trained: bool  # by an optimizer of the run


def _list_weights(models: Sequence[nn.Module], others: Sequence[nn.Module]) -> list[_Weight]:
    """Each parameter once, though a model holds those of another: as one of a trained model, if it is."""
    found: dict[int, _Weight] = {}
    for model, is_trained in (*((model, True) for model in models), *((model, False) for model in others)):
        for name, parameter in model.named_parameters():
            weight = _Weight(f"{name} of {type(model).__name__}", parameter.detach(), is_trained)
            if _is_comparable(parameter):
                found.setdefault(id(parameter), weight)
    return list(found.values())


def _is_comparable(parameter: nn.Parameter) -> bool:
    """Not so where a rank has a part only, a DTensor, or no numbers at all."""
    is_plain = type(parameter.data) is Tensor and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and parameter.element_size() in _INTEGERS


def check_same_weights(weights: Sequence[_Weight], layout: Layout, device: torch.device, step: int) -> None:
    """RequestError, on every rank, if one of these parameters differs between data ranks.

    A collective: one sum of bits per parameter, and one small exchange. Only if that shows a difference, the numbers
    themselves are compared: they may differ by the rounding of `step` steps.
    """
    if layout.data_size == 1 or not weights:
        return
    sums = torch.stack([_sum_bits(weight.tensor).to(device) for weight in weights])
    both = torch.cat((sums, -sums))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=layout.data_group)
    largest, smallest = both[: len(sums)], -both[len(sums) :]
    for place in (largest != smallest).nonzero().flatten().tolist():
        apart = _measure(weights[place].tensor.to(device), layout, step)
        if apart is not None:
            raise _differ(weights[place], apart, sums[place], layout, step)


def _sum_bits(tensor: Tensor) -> Tensor:
    """A whole number that any other weights would change; the order of the sum does not."""
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _measure(tensor: Tensor, layout: Layout, step: int) -> float | None:
    """The largest difference between two ranks' numbers; None if rounding explains it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = torch.nan_to_num(real.double()).flatten()
    both = torch.cat((numbers, -numbers))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=layout.data_group)
    apart = float((both[: len(numbers)] + both[len(numbers) :]).max())
    unit = torch.finfo(real.dtype).eps if real.is_floating_point() else 0.0
    return apart if apart > _ROUNDINGS * step * unit * float(both.abs().max()) else None


def _differ(weight: _Weight, apart: float, mine: Tensor, layout: Layout, step: int) -> RequestError:
    found: list[Any] = [None] * layout.data_size
    dist.all_gather_object(found, int(mine), group=layout.data_group)
    ranks = [rank for rank, sums in zip(layout.data_ranks, found, strict=True) if sums != found[0]]
    words = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
    others = f"after step {step} the weights of {words} are not those of rank {layout.data_ranks[0]}"
    if not weight.is_trained:
        return RequestError(
            f"{others}: {weight.name}, which is prepared and not trained, differs by up to {apart:.2g}",
            "call what changes it on every rank, not under `if rt.is_main:`: ema.update_parameters(model),"
            " load_state_dict(…)",
        )
    return RequestError(
        f"{others}: {weight.name} differs by up to {apart:.2g}",
        "call the model that rt.prepare returned, give the optimizer its parameters, and change weights on every rank"
        " alike",
    )
