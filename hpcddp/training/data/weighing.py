"""How much each micro batch weighs in the mean over the global batch, and the backward pass with that weight.

A micro batch weighs by its samples, or by what the caller counts in them: tokens that are not padding, pixels that have
a label, the sum of class weights. Those counts are in the data, so the data ranks sum them once per step, before its
first backward pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.parallel.layout import Layout
from hpcddp.units import format_count

Count = Callable[[Any], float]


class Loaded(NamedTuple):
    """A micro batch as it comes from the data set, on the host."""

    micro: MicroBatch
    content: Any  # what the samples collated to


class Weight(NamedTuple):
    """Factors for the loss of one micro batch. They are tensors where the host would have to wait for the number."""

    counted: float  # samples, or what the caller counts; 0 in a micro batch that only keeps the ranks in step
    mean: float | Tensor  # of a loss that is a mean over the counted ones
    each: float  # of a loss that is a sum, whatever counts in it


class WeighedBatch(NamedTuple):
    """One micro batch of a batch: this rank's samples of it, how much they weigh, and what they collated to."""

    micro: MicroBatch
    weight: Weight
    content: Any  # on the host


class Weighing:
    """Gives micro batches their weights. With `count` it reads all micro batches of a step first.

    `averaged_over` is the number that the sum of all gradients is divided by later. With several `slots`, one for each
    slice of the global batch, a sum of counts that are no whole numbers does not depend on the number of ranks.
    """

    def __init__(
        self,
        averaged_over: int,
        layout: Layout,
        device: torch.device,
        count: Count | None = None,
        slots: int = 1,
    ) -> None:
        self.count = count
        self._slots = slots
        self._averaged_over = averaged_over
        self._layout = layout
        self._device = device
        self._counted = 0.0  # on this rank, in the step that the loop is at
        self._warned = False

    def steps(self, loaded: Iterator[Loaded]) -> Iterator[list[WeighedBatch]]:
        """All micro batches of one global batch at a time. With `count` a collective, once per step."""
        step: list[Loaded] = []
        for one in loaded:
            step.append(one)
            if not one.micro.last:
                continue
            counts = [float(micro.samples) for micro, _ in step]
            total: float | Tensor = one.micro.total
            if self.count is not None:
                counts = [_count_parts(self.count, part) for part in step]
                self._counted = math.fsum(counts)
                total = self._add_up([micro.slice or 0 for micro, _ in step], counts)
            parts = zip(step, counts, strict=True)
            yield [WeighedBatch(micro, self._weigh(count, total), content) for (micro, content), count in parts]
            step = []

    def _weigh(self, count: float, total: float | Tensor) -> Weight:
        """W * n / N: the mean loss over n samples times this, averaged over W data ranks, is its part of the mean over
        N.

        It holds for any split: uneven shares, accumulation, the last partial global batch. Where gradients are summed
        and not averaged, W is 1.
        """
        return Weight(count, self._averaged_over * count / total, float(self._averaged_over))

    def take(self) -> dict[str, float]:
        """The numbers of this step to be summed over the data ranks."""
        return {"counted": self._counted} if self.count is not None else {}

    def learn(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """Takes the sums over the data ranks; returns the entries for metrics.jsonl."""
        if "counted" not in sums:
            return {}
        if sums["counted"]:
            return {"counted": sums["counted"]}
        if not self._warned and self._layout.rank == 0:
            print("hpcddp: warning: a global batch had no part that counts; its gradient is zero", file=sys.stderr)
        self._warned = True
        return {"counted": 0.0, "loss": None}  # a mean over nothing

    def _add_up(self, slots: list[int], counts: list[float]) -> float | Tensor:
        """Over all data ranks; 1 in place of 0, so that every weight is 0 in a global batch without a counted part.

        In float64, where whole numbers are exact up to 2^53. On a GPU it stays there: waiting for the number would mean
        waiting for the step before.
        """
        on_device = self._device.type != "cpu" and (self._layout.data_size > 1 or self._slots > 1)
        mine = [0.0] * self._slots
        for slot, count in zip(slots, counts, strict=True):
            mine[slot if self._slots > 1 else 0] += count
        if self._layout.data_size == 1 and not on_device:
            return math.fsum(counts) or 1.0
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if self._layout.data_size > 1:
            dist.all_reduce(sums, group=self._layout.data_group)
        if not on_device:
            return math.fsum(sums.tolist()) or 1.0
        total = sums.sum()
        return total.masked_fill_(total == 0, 1.0)


def _count_parts(count: Count, loaded: Loaded) -> float:
    """Count what weighs in a micro batch: 0 for one that only keeps the ranks in step."""
    if loaded.micro.samples == 0:
        return 0.0
    parts = float(count(loaded.content))
    if not 0 <= parts < math.inf:
        raise RequestError(
            f"count= gave {parts:g} for a micro batch of {format_count(loaded.micro.samples, 'sample')}",
            "return how many parts count, such as: lambda batch: int((batch[1] != -100).sum()); or the sum of their"
            " weights, of which none is negative",
        )
    return parts


# The backward pass of one micro batch, weighted by its part of the global batch.


def run_backward(
    loss: Tensor,
    micro: MicroBatch,
    weight: Weight,
    models: Sequence[nn.Module],
    *,
    summed: bool,
    scaler: torch.amp.GradScaler | None = None,
) -> float | Tensor | None:
    """Backward from the mean loss over what counts in the micro batch; `summed`: from the sum over its samples, which
    gives the sum over the global batch.

    Returns the loss's weight, None if nothing counts. `models` have all their parameters on this rank. Without any (a
    sharded model) a mean over nothing is refused where it is NaN, which would reach the gradients.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise _no_loss(loss, summed=summed)
    counts = (micro.samples if summed else weight.counted) > 0
    if not counts and micro.samples and not models and not bool(loss.isfinite()):
        raise RequestError(
            f"none of this micro batch's {micro.samples} samples has a part that counts, and its mean loss is NaN",
            "a mean that is 0 there: loss = losses.sum() / max(parts, 1)",
        )
    factor = weight.each if summed and counts else weight.mean
    whole = isinstance(factor, float) and factor == 1.0  # a tensor is not looked at: the host would wait for it
    there = factor.to(loss.device) if isinstance(factor, Tensor) else factor  # a model may end on another device
    weighted = loss if whole else loss * there
    with nullcontext() if counts else zeroed_gradients(models):
        try:
            (scaler.scale(weighted) if scaler is not None else weighted).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        except RuntimeError as error:
            if not hasattr(loss, "device_mesh") or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RequestError(
                "the loss adds a number of the parameters, which the ranks have in parts (a DTensor), to one of the"
                " model's output, which is a plain tensor",
                "make it whole first: penalty = sum(p.square().sum().full_tensor() for p in model.parameters()); or the"
                " optimizer's weight_decay",
            ) from error
    return factor if counts else None


def _no_loss(loss: object, *, summed: bool) -> RequestError:
    """The error for a value from which no backward pass can start."""
    if not isinstance(loss, Tensor):
        return RequestError(f"rt.backward was given a {type(loss).__name__}", "rt.backward(loss_fn(model(x), y))")
    if loss.numel() == 1:
        return RequestError(
            "the loss has no gradient: it was detached, or made of what requires none",
            "rt.backward(loss), before loss.detach() and outside torch.no_grad(), with a model that is trained",
        )
    return RequestError(
        f"the loss has shape {tuple(loss.shape)}, and a backward pass starts from one number",
        "rt.backward(loss.sum(), summed=True)" if summed else "rt.backward(loss.mean())",
    )


def _zeros(gradient: Tensor | None) -> Tensor | None:
    """DDP passes None for a parameter that was not used (find_unused_parameters)."""
    return None if gradient is None else torch.zeros_like(gradient)


@contextmanager
def zeroed_gradients(models: Sequence[nn.Module]) -> Iterator[None]:
    """Backward passes in the body give zero gradients for the models' parameters.

    A mean over nothing is 0/0, and NaN * 0 is NaN. The backward pass itself has to run: other ranks wait for its
    collectives.
    """
    with ExitStack() as stack:
        for parameter in {p for model in models for p in model.parameters() if p.requires_grad}:
            hook = parameter.register_hook(_zeros)  # type: ignore[no-untyped-call]  # torch does not annotate it
            stack.callback(hook.remove)
        yield
