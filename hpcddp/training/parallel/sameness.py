"""Whether the weights are numbers, and the same on all data ranks, and whether these evaluate together.

Where they are not the same, the training is wrong, and nothing else shows it. Where one is NaN or infinite, each step
that follows is lost, and a checkpoint would take the place of the last good one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.collectives import ask_all
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.torch_compat import local_part
from hpcddp.units import format_count

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHECKED_FIRST = 2  # steps of an attempt; a model that the ranks train each on its own differs after one
# Other hardware or another number of threads may round each step otherwise: by so many units in the last place of the
# largest weight, in each step. A mistake moves the weights by more.
_ROUNDINGS = 4


class SameWeights:
    """Compares the weights in the first steps of an attempt and before checkpoints, and the evaluations of the ranks.

    `others` are models that are prepared and not trained, such as averages and teachers.

    Counts how many loops over evaluation data this rank began, and how many went on after their first batch. An
    evaluation ran on some ranks only if one rank has gone on in more loops than another has begun. Else it may be that
    rank 0 looked at a first batch, or that one rank's numbers made it `break`.
    """

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
        self._checked_at: int | None = None
        self._started = self._gone_on = 0  # loops over evaluation data

    def evaluation_begins(self) -> None:
        """A loop over evaluation data."""
        self._started += 1

    def evaluation_goes_on(self) -> None:
        """Behind its first batch."""
        self._gone_on += 1

    def check(self, step: int, *, at_end: bool = False) -> None:
        """See `check_finite` and `compare`; once a step. At the end of the run, rank 0 may have made its model another
        one, to export it: the weights are not compared."""
        is_new, self._checked_at = self._checked_at != step, step
        if is_new:
            check_finite(self._models, self._layout, step)
        if is_new or at_end:
            self.compare(step, weights=not at_end)

    def compare(self, step: int, *, weights: bool = True) -> None:
        """RequestError, on every rank, if a parameter or the evaluations differ between data ranks.

        A collective: one sum of bits per parameter, and one small exchange. Only if that shows a difference, the
        numbers themselves are compared: they may differ by the rounding of `step` steps.
        """
        layout, device = self._layout, self._device
        if layout.data_size == 1:
            return
        compared = _list_weights([*self._models, *self._others()]) if weights else []
        loops = torch.tensor([self._started, self._gone_on], device=device)
        sums = torch.stack([*loops, *(sum_bits(tensor).to(device) for _, tensor in compared)])
        both = torch.cat((sums, -sums))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=layout.data_group)
        largest, smallest = both[: len(sums)], -both[len(sums) :]
        most, least = int(largest[1]), int(smallest[0])
        if most > least:
            raise RequestError(
                f"an evaluation ran on some ranks only, and each rank sees its share of the data: by step {step} one"
                f" rank went {format_count(most, 'time')} over evaluation data, and another {least}",
                "evaluate on every rank, rt.sum(…) or rt.gather(…) the results, then `if rt.is_main:` or rt.print(…)",
            )
        differ = (largest != smallest).tolist()[2:]
        for (name, tensor), bits, differs in zip(compared, sums[2:], differ, strict=True):
            apart = _measure(tensor.to(device), layout, step) if differs else None
            if apart is not None:
                raise _differ(name, apart, bits, layout, step)


def check_finite(models: Sequence[nn.Module], layout: Layout, step: int) -> None:
    """RequestError, on every rank, if a weight that is trained is NaN or infinite on one of them. A collective."""
    named = [
        (f"{name} of {type(model).__name__}", local_part(parameter).detach())
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    ]
    # not one sum for all: each tensor may be on a device of its own
    lost = next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
    first = next(filter(None, ask_all(lost, layout.world_size)), None)
    if first is not None:
        raise RequestError(
            f"after step {step} the weights are no numbers any more: {first} has NaN or infinity. No checkpoint is"
            " written of them",
            "continue from the checkpoint before with a smaller learning rate, or bound each step:"
            " torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        )


def _list_weights(models: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """Each parameter that is whole on this rank, once, though a model may hold those of another."""
    found: dict[int, tuple[str, Tensor]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if is_whole(parameter):
                label = f"{name} of {type(model).__name__}"
                found.setdefault(id(parameter), (label, parameter.detach()))
    return [*found.values()]


def is_whole(tensor: Tensor) -> bool:
    """Whether this rank has all of a tensor: not of a DTensor, nor of one without numbers."""
    is_plain = type(tensor.data) is Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and tensor.element_size() in _INTEGERS


def sum_bits(tensor: Tensor) -> Tensor:
    """A whole number that any other numbers would change; the order of the sum does not. Complex ones count as real."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _measure(tensor: Tensor, layout: Layout, step: int) -> float | None:
    """The largest difference between two ranks' numbers; None if rounding explains it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = torch.nan_to_num(real.double()).flatten()
    both = torch.cat((numbers, -numbers))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=layout.data_group)
    apart = float((both[: len(numbers)] + both[len(numbers) :]).max())
    unit = torch.finfo(real.dtype).eps if real.is_floating_point() else 0.0
    return apart if apart > _ROUNDINGS * step * unit * float(both.abs().max()) else None


def _differ(name: str, apart: float, mine: Tensor, layout: Layout, step: int) -> RequestError:
    found = ask_all(int(mine), layout.data_size, layout.data_group)
    ranks = [rank for rank, sums in zip(layout.data_ranks, found, strict=True) if sums != found[0]]
    words = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
    return RequestError(
        f"after step {step} the weights of {words} are not those of rank {layout.data_ranks[0]}: {name} differs by up"
        f" to {apart:.2g}",
        "call the model that rt.prepare returned, give the optimizer its parameters, and change weights, averages and"
        " learning rates on every rank alike, not under `if rt.is_main:`: scheduler.step(rt.sum(loss)), where it"
        " follows a loss; random numbers that change weights, too: rt.broadcast(torch.randn(…))",
    )


class UsedAlike:
    """Compares, in the first passes of an attempt, which parameters have a gradient on the ranks that average gradients
    in shards (FSDP2)."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._checked = 0

    def check(self, models: Iterable[nn.Module]) -> None:
        """Check the models after the last backward pass of a step. RequestError, on every rank, for a parameter that
        only some ranks have used. A collective in the first steps."""
        layout = self._layout
        if self._checked == CHECKED_FIRST or layout.data_size == 1:
            return
        self._checked += 1
        trained = [(name, p) for model in models for name, p in model.named_parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for _, p in trained], dtype=torch.int64, device=self._device)
        dist.all_reduce(used, group=layout.data_group)
        for (name, _), count in zip(trained, used.tolist(), strict=True):
            if 0 < count < layout.data_size:
                raise RequestError(
                    f"only {count} of {layout.data_size} ranks have a gradient for {name} in this step: in shards torch"
                    " would add it to that of another parameter",
                    'hpcddp.runtime(parallel="ddp") with rt.wrap(model, find_unused_parameters=True); or let every rank'
                    " use the layer in each step: output + 0 * layer(x)",
                )
