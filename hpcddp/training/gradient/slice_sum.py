"""Two ways to add up what the fixed slices of a global batch give, each with one result for any number of ranks.

Both take one list of tensors per slice (the gradients of all parameters, say), and give totals for any part of that
list, so that a bucket of gradients can be on its way while others are still being computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcddp.errors import RequestError
from hpcddp.training.gradient.exchange import Exchange
from hpcddp.training.torch_compat import add_to_each, largest_magnitudes

_SIGNIFICANT_BITS = 56


class TreeSum:
    """One fixed binary tree, inside a rank over its slices and then over the ranks.

    The trees of two world sizes are the same sum if each rank has a power of two of slices (or all of them). At most
    log2 of them are kept at a time.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._levels: list[tuple[int, list[Tensor]]] = []  # slices in it, their sum

    def add(self, tensors: list[Tensor]) -> None:
        """A slice that is not the rank's last; takes the tensors over."""
        count = 1
        while self._levels and self._levels[-1][0] == count:
            _, earlier = self._levels.pop()
            add_to_each(earlier, tensors)
            count, tensors = 2 * count, earlier
        self._levels.append((count, tensors))

    def total(self, indices: Sequence[int], last: list[Tensor], flat: Tensor) -> Tensor:
        """The sum over all slices of all ranks of the tensors at these indices in the list.

        `last` are the last slice's, as views of `flat`; the result is `flat` or a vector like it, and both may be
        overwritten. A single rank's result is also in `last`, and it may give any `flat`.
        """
        for _, earlier in reversed(self._levels):
            add_to_each(last, [earlier[index] for index in indices])
        return self._exchange.sum_in_tree(flat)

    def clear(self) -> None:
        """Before the next global batch."""
        self._levels.clear()


class IntegerSum:
    """Integers on a grid that all slices share: addition is associative, so any split and any algorithm will do.

    Each tensor's grid follows from the largest magnitude in it over all slices, which must be known first: a rank keeps
    the tensors of all its slices.
    """

    def __init__(self, exchange: Exchange, slices: int) -> None:
        self._exchange = exchange
        self._bits = min(_SIGNIFICANT_BITS, 62 - slices.bit_length())  # the sum of all slices stays below 2^62
        self._kept: list[list[Tensor]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """A slice that is not the rank's last; takes the tensors over."""
        self._kept.append(tensors)

    def total(self, indices: Sequence[int], last: list[Tensor], flat: Tensor) -> Tensor:
        """As of TreeSum; a tensor that holds a NaN or an infinity in any slice becomes NaN throughout."""
        slices = [[kept[index] for index in indices] for kept in self._kept] + [last]
        peaks = torch.stack([largest_magnitudes(tensors) for tensors in slices])
        peak = self._exchange.largest(torch.where(peaks.isfinite(), peaks, torch.inf).amax(0))
        _, exponent = torch.frexp(torch.where(peak.isfinite(), peak, 1.0))
        scale = torch.ldexp(torch.ones_like(peak), (self._bits - exponent).clamp(max=1000))
        units = self._exchange.sum_integers(
            torch.cat([self._count_units(alike, scale[nth]) for nth, alike in enumerate(zip(*slices, strict=True))])
        )
        parts = torch.split(units, [view.numel() for view in last])
        for nth, (view, part) in enumerate(zip(last, parts, strict=True)):
            total = torch.where(peak[nth].isfinite(), part.double() / scale[nth], torch.nan)
            view.copy_(total.view_as(view))
        return flat

    def _count_units(self, alike: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """(n,) int64: one tensor's sum over this rank's slices in units of 1 / scale, in its logical order."""
        total = torch.zeros(alike[0].numel(), dtype=torch.int64, device=alike[0].device)
        for tensor in alike:
            units = (tensor.double() * scale).nan_to_num_(0.0, 0.0, 0.0).round_()
            total += units.to(torch.int64).reshape(-1)
        return total

    def clear(self) -> None:
        """Before the next global batch."""
        self._kept.clear()


def make_sum(method: str, exchange: Exchange, slices: int) -> TreeSum | IntegerSum:
    """`method` is "tree" or "integer". RequestError for a tree that another world size would grow differently."""
    if method == "integer":
        return IntegerSum(exchange, slices)
    data_size = exchange.data_size
    each, rest = divmod(slices, data_size)
    if data_size > 1 and (rest or each & (each - 1)):
        fits = [w for w in range(1, slices + 1) if slices % w == 0 and not (slices // w) & (slices // w - 1)]
        raise RequestError(
            f"the tree over {slices} slices cannot be shared by {data_size} ranks: each needs a power of two of them",
            f"use {' or '.join(map(str, sorted({1, *fits})))} ranks, or exact='integer' from the first run on",
        )
    return TreeSum(exchange)
