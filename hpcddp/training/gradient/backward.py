"""The backward pass of one micro batch, weighted by its part of the global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight


def run_backward(
    loss: Tensor,
    micro: MicroBatch,
    weight: Weight,
    models: Sequence[nn.Module],
    *,
    summed: bool,
    scaler: torch.amp.GradScaler | None = None,
) -> float | Tensor | None:
    """Backward from the mean loss over what counts in the micro batch (`summed`: the sum).

    Returns the loss's weight, None if nothing counts. `models` have all their parameters on this rank. Without any (a
    sharded model) a mean over nothing is refused, because its NaN would reach the gradients.
    """
    _check_loss(loss, summed=summed)
    counts = weight.counted > 0
    if not counts and micro.samples and not models and not summed:
        raise RequestError(
            f"none of this micro batch's {micro.samples} samples has a part that counts, so its mean loss is NaN",
            "take the sum of the loss and rt.backward(loss, summed=True)",
        )
    factor = weight.each if summed and counts else weight.mean
    with nullcontext() if counts else zeroed_gradients(models):
        whole = isinstance(factor, float) and factor == 1.0  # a tensor is not looked at: the host would wait for it
        there = factor.to(loss.device) if isinstance(factor, Tensor) else factor  # a model may end on another device
        weighted = loss if whole else loss * there
        with _explained(loss):
            (scaler.scale(weighted) if scaler is not None else weighted).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    return factor if counts else None


@contextmanager
def _explained(loss: Tensor) -> Iterator[None]:
    """RequestError where torch does not go from a loss that is divided among ranks back into plain tensors."""
    try:
        yield
    except RuntimeError as error:
        if not hasattr(loss, "device_mesh") or "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RequestError(
            "the loss adds a number of the parameters, which the ranks have in parts (a DTensor), to one of the model's"
            " output, which is a plain tensor",
            "make it whole first: penalty = sum(p.square().sum().full_tensor() for p in model.parameters()); or the"
            " optimizer's weight_decay",
        ) from error


def _check_loss(loss: object, *, summed: bool) -> None:
    """RequestError for what no backward pass can start from."""
    if not isinstance(loss, Tensor):
        raise RequestError(f"rt.backward was given a {type(loss).__name__}", "rt.backward(loss_fn(model(x), y))")
    if loss.numel() != 1:
        raise RequestError(
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
