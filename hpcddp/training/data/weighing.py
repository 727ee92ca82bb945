"""How much each micro batch weighs in the mean over the global batch, and the backward pass with that weight.

A micro batch weighs by its samples, or by what the caller counts in them: tokens that are not padding, pixels that have
a label, the sum of class weights. Those counts are in the data, so the data ranks sum them once per step, before its
first backward pass.
"""

from __future__ import annotations

import math
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


class WeighedBatch(NamedTuple):
    """One micro batch of this rank, and the factors for its loss: tensors where the host would have to wait for the
    number."""

    micro: MicroBatch
    content: Any  # what the samples collated to, on the host
    counted: float  # samples, or what the caller counts; 0 in a micro batch that only keeps the ranks in step
    mean: float | Tensor  # for a loss that is a mean over the counted ones
    each: float  # for a loss that is a sum, whatever counts in it


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

    def steps(self, micro_batches: Iterator[tuple[MicroBatch, Any]]) -> Iterator[list[WeighedBatch]]:
        """All micro batches of one global batch at a time, from each with its content. With `count` a collective, once
        per step."""
        step: list[tuple[MicroBatch, Any]] = []
        for micro, content in micro_batches:
            step.append((micro, content))
            if not micro.last:
                continue
            counts = [float(one.samples) for one, _ in step]
            total: float | Tensor = micro.total
            if self.count is not None:
                counts = [_count_parts(self.count, *one) for one in step]
                self._counted = math.fsum(counts)
                total = self._add_up([one.slice or 0 for one, _ in step], counts)
            # W * n / N: the mean loss over n samples times this, averaged over W data ranks, is its part of the mean
            # over N, for any split: uneven shares, accumulation, the last partial global batch. W is 1 where gradients
            # are summed and not averaged.
            each, parts = self._averaged_over, zip(step, counts, strict=True)
            yield [WeighedBatch(*one, count, each * count / total, float(each)) for one, count in parts]
            step = []

    def list_numbers(self) -> dict[str, float]:
        """List the numbers of this step that are summed over the data ranks."""
        return {"counted": self._counted} if self.count is not None else {}

    def list_entries(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """List the entries for metrics.jsonl, from the sums over the data ranks."""
        if "counted" not in sums:
            return {}
        return {"counted": sums["counted"]} | ({} if sums["counted"] else {"loss": None})  # a mean over nothing

    def _add_up(self, slots: list[int], counts: list[float]) -> float | Tensor:
        """Over all data ranks; 1 in place of 0, so that every weight is 0 in a global batch without a counted part.

        In float64, where whole numbers are exact up to 2^53. On a GPU it stays there: waiting for the number would mean
        waiting for the step before.
        """
        if self._layout.data_size == 1 and (self._slots == 1 or self._device.type == "cpu"):
            return math.fsum(counts) or 1.0
        mine = [0.0] * self._slots
        for slot, count in zip(slots, counts, strict=True):
            mine[slot if self._slots > 1 else 0] += count
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if self._layout.data_size > 1:
            dist.all_reduce(sums, group=self._layout.data_group)
        if self._device.type == "cpu":
            return math.fsum(sums.tolist()) or 1.0
        total = sums.sum()
        return total.masked_fill_(total == 0, 1.0)


def _count_parts(count: Count, micro: MicroBatch, content: Any) -> float:
    """Count what weighs in a micro batch: 0 for one that only keeps the ranks in step."""
    if micro.samples == 0:
        return 0.0
    parts = float(count(content))
    if not 0 <= parts < math.inf:
        raise RequestError(
            f"count= gave {parts:g} for a micro batch of {format_count(micro.samples, 'sample')}",
            "return how many parts count, such as: lambda batch: int((batch[1] != -100).sum()); or the sum of their"
            " weights, of which none is negative",
        )
    return parts


def run_backward(
    loss: Tensor,
    part: WeighedBatch,
    models: Sequence[nn.Module],
    *,
    summed: bool,
    scaler: torch.amp.GradScaler | None = None,
) -> float | Tensor | None:
    """The backward pass of one micro batch, from the mean loss over what counts in it; `summed`: from the sum over its
    samples, which gives the sum over the global batch.

    Returns the loss's weight, None if nothing counts. `models` have all their parameters on this rank. Without any (a
    sharded model) a mean over nothing is refused where it is NaN, which would reach the gradients.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            what = "a tensor without a gradient" if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"
        raise RequestError(
            f"rt.backward was given {what}: a backward pass starts from one number that depends on parameters",
            "rt.backward(loss.mean()), before loss.detach() and outside torch.no_grad()",
        )
    samples = part.micro.samples
    counts = (samples if summed else part.counted) > 0
    if not counts and samples and not models and not bool(loss.isfinite()):
        raise RequestError(
            f"none of this micro batch's {samples} samples has a part that counts, and its mean loss is NaN",
            "a mean that is 0 there: loss = losses.sum() / max(parts, 1)",
        )
    factor = part.each if summed and counts else part.mean
    if isinstance(factor, Tensor):
        factor = factor.to(loss.device)  # a model may end on another device
    is_one = not isinstance(factor, Tensor) and factor == 1.0  # the host would wait for a tensor's number
    weighted = loss if is_one else loss * factor
    with nullcontext() if counts else zeroed_gradients(models):
        (scaler.scale(weighted) if scaler is not None else weighted).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    return factor if counts else None


@contextmanager
def zeroed_gradients(models: Sequence[nn.Module]) -> Iterator[None]:
    """Backward passes in the body give zero gradients for the models' parameters.

    A mean over nothing is 0/0, and NaN * 0 is NaN. The backward pass itself has to run: other ranks wait for its
    collectives.
    """

    def zero(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.zeros_like(gradient)  # None: DDP found the parameter unused

    with ExitStack() as stack:
        for parameter in {p for model in models for p in model.parameters() if p.requires_grad}:
            hook = parameter.register_hook(zero)  # type: ignore[no-untyped-call]  # torch does not annotate it
            stack.callback(hook.remove)
        yield
