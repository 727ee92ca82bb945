"""The backward pass of one micro batch, weighted by its part of the global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.samples.loader import Batch


def run_backward(
    loss: Tensor,
    batch: Batch | None,
    models: Sequence[nn.Module],
    *,
    summed: bool,
    scaler: torch.amp.GradScaler | None = None,
) -> float | Tensor | None:
    """Backward from the mean over what counts in the micro batch (`summed`: the sum).

    Returns the loss's weight, None if nothing counts. `models` hold all their parameters on this rank. Without any (a
    model in parts) a mean over nothing is refused, since its NaN would reach the gradients.
    """
    if batch is None:
        raise RequestError("rt.backward() was called outside of rt.micro()", "with rt.micro(batch): rt.backward(loss)")
    counts = batch.counted > 0
    if not counts and batch.samples and not models and not summed:
        raise RequestError(
            f"none of this micro batch's {batch.samples} samples has a part that counts, so its mean loss is NaN",
            "take the sum of the loss and rt.backward(loss, summed=True)",
        )
    weight = batch.weight_each if summed and counts else batch.weight
    with nullcontext() if counts else zeroed_gradients(models):
        whole = isinstance(weight, float) and weight == 1.0  # a tensor is not looked at: the host would wait for it
        weighted = loss if whole else loss * weight
        (scaler.scale(weighted) if scaler is not None else weighted).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    return weight if counts else None


@contextmanager
def zeroed_gradients(models: Sequence[nn.Module]) -> Iterator[None]:
    """What comes out of backward passes for the models' parameters counts for nothing, be it NaN.

    A mean over no parts is 0/0, and NaN * 0 is NaN. The backward pass itself has to run: other ranks wait for its
    collectives.
    """
    with ExitStack() as stack:
        for parameter in {p for model in models for p in model.parameters() if p.requires_grad}:
            hook = parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]  # torch does not annotate it
            stack.callback(hook.remove)
        yield
