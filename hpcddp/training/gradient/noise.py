"""The gradient noise scale: up to about how many samples a larger global batch saves steps.

McCandlish et al., "An empirical model of large-batch training", 2018 (arXiv 1812.06162), appendix A. With g_i the mean
gradient of micro batch i over n_i samples, P micro batches in a step, and g the mean gradient over all N samples,

    A = sum of (n_i / N) |g_i|^2        expected: |G|^2 + S P / N
    B = |g|^2                           expected: |G|^2 + S / N

where G is the true gradient and S the trace of the covariance of one sample's gradient. So S = N (A - B) / (P - 1) and
|G|^2 = B - S / N, and the noise scale is S / |G|^2. For equal n_i this is the paper's estimator from two batch sizes.

Gradients are only looked at, never touched: on a measured step a hook on each parameter takes the norm of what a micro
batch's backward pass brings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from hpcddp.batchplan import BatchPlan
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.data.weighing import Weight

_KEPT = 0.95  # of the running sums, per measured step: a mean over about 20 of them


class NoiseMeter:
    """Measures every `every` steps; None: never, and nothing is hooked. Lives as long as an attempt."""

    def __init__(self, every: int | None, is_first: bool, averaged_over: int) -> None:
        self._every = every
        self._is_first = is_first
        self._hooks = ExitStack()
        self._norms: dict[nn.Parameter, Tensor] = {}  # of what this micro batch's backward pass has brought
        self._averaged_over = averaged_over
        self._parameters: dict[nn.Parameter, None] = {}  # a set that keeps its order
        self._squares: list[Tensor] = []  # of this rank's micro batches: their terms of A
        self._total_square: Tensor | None = None  # B
        self._void = False
        self._noise = self._signal = 0.0  # running sums, apart: the mean of ratios would be far off
        self.scale: float | None = None  # samples; None: not known (yet)

    def check(self, plan: BatchPlan) -> None:
        """Warns of a plan from which no noise can be seen."""
        alone = plan.slices is None and plan.data_size * plan.accumulation_steps == 1
        if self._every is not None and alone:
            print(
                "hpcddp: warning: the gradient noise scale takes two micro batches per step, and this plan has one;"
                f" set max_micro_batch={-(-plan.global_batch // 2)} or less",
                file=sys.stderr,
            )

    def watch(self, model: nn.Module) -> None:
        """Take the model's parameters in."""
        self._parameters.update(dict.fromkeys(p for p in model.parameters() if p.requires_grad))

    def start(self, weight: Weight, step: int) -> None:
        """A micro batch starts, in `step` (from 0)."""
        if self._every is None or step % self._every:
            return
        for parameter in self._parameters if weight.counted else ():
            self._hooks.callback(self._listen(parameter, self._norms).remove)

    def collect(self, micro: MicroBatch, weight: Weight, step: int) -> None:
        """All gradients of the micro batch are there, the ranks' sum included."""
        if self._every is None or step % self._every:
            return
        self._hooks.close()
        if self._norms:
            # weight = W n / N, so the gradient that came is W (n_i / N) g_i
            self._squares.append(_sum_squares(self._norms.values()) / (weight.mean * self._averaged_over))
            self._norms.clear()
        if micro.last and self._is_first:  # the same on every rank
            grads = [_norm(p.grad) for p in self._parameters if p.grad is not None]
            self._total_square = _sum_squares(grads) if grads else None

    def void(self) -> None:
        """This step cannot be measured: a backward pass came after its gradients were collected."""
        self._void = True

    def _listen(self, parameter: nn.Parameter, norms: dict[nn.Parameter, Tensor]) -> torch.utils.hooks.RemovableHandle:
        def note(gradient: Tensor) -> None:
            self._void = self._void or parameter in norms  # a second backward pass: the norm of the sum is not known
            norms[parameter] = _norm(gradient)

        handle: torch.utils.hooks.RemovableHandle = parameter.register_hook(note)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return handle

    def take(self, step: int) -> dict[str, Tensor | float]:
        """The numbers of this step to be summed over the data ranks; the names are the same on every rank."""
        if self._every is None or step % self._every:
            return {}
        squares, total, void = self._squares, self._total_square, self._void
        self._squares, self._total_square, self._void = [], None, False
        return {
            "pieces": float("nan") if void else float(len(squares)),
            "squares": torch.stack(squares).sum() if squares else 0.0,
            "square": total if total is not None else 0.0,
        }

    def learn(self, sums: Mapping[str, float], samples: int) -> dict[str, float | None]:
        """Takes the sums over the data ranks of a step over so many `samples`, if it was measured; returns the entries
        for metrics.jsonl."""
        if "pieces" not in sums or not sums["pieces"] >= 2:
            return {}
        noise, signal = split_square(sums["squares"], sums["square"], sums["pieces"], samples)
        if not abs(noise) + abs(signal) < float("inf"):  # a diverged step says nothing
            return {"noise_scale": None}
        self._noise = _KEPT * self._noise + noise
        self._signal = _KEPT * self._signal + signal
        self.scale = self._noise / self._signal if self._signal > 0 else None
        return {"noise_scale": self.scale}


def split_square(squares: float, square: float, pieces: float, samples: int) -> tuple[float, float]:
    """(S, |G|^2) from A and B of this file's heading: of a step over `samples` samples in `pieces` micro batches."""
    noise = samples * (squares - square) / (pieces - 1)
    return noise, square - noise / samples


def describe_noise(scale: float | None, global_batch: int) -> str | None:
    """A sentence for people; None if nothing was measured."""
    if scale is None:
        return None
    measured = f"gradient noise scale about {_round(scale)} samples; global batch {global_batch}"
    if scale >= 2 * global_batch:
        return f"{measured}: a batch of up to about {_round(scale)} still saves steps"
    if scale >= global_batch / 2:
        return f"{measured}: about as large as it should be; a larger one saves few steps"
    return f"{measured}: a larger batch saves hardly any steps"


def _round(number: float) -> str:
    """Two digits: the estimate has no more."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 1 else f"{number:.2g}"


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm


def _sum_squares(norms: Iterable[Tensor]) -> Tensor:
    return torch.stack([norm.double() for norm in norms]).square().sum()
