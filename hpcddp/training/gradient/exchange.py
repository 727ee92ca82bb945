"""Sums over the data ranks that are the same to the last bit with any library and network.

A floating-point sum depends on its order, and an all-reduce chooses the order. Here the collective only moves data, and
each rank adds what it received in the order of the ranks; or integers are added, whose sum does not depend on the
order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.torch_compat import all_gather_flat


def fold_pairs(rows: Tensor) -> Tensor:
    """The sum of the rows (count, n) by one fixed binary tree: T(x0, x1, x2, …) = T(x0 + x1, x2 + x3, …).

    An odd last row goes up unchanged. Overwrites `rows`.
    """
    while (count := rows.shape[0]) > 1:
        pairs = count // 2
        rows[0 : 2 * pairs : 2].add_(rows[1 : 2 * pairs : 2])
        rows = rows[0::2]
    return rows[0]


class Exchange:
    """Sums flat vectors over the data ranks. Each method is a collective, which every rank calls in the same order.

    gloo moves CPU memory only: with `through_cpu` vectors on a GPU are copied there first.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None, *, through_cpu: bool) -> None:
        self.data_size = layout.data_size
        self._data_rank = layout.data_rank
        self._group = group
        self._through_cpu = through_cpu

    def sum_in_tree(self, flat: Tensor) -> Tensor:
        """The sum (n,) of every rank's `flat` (n,) in the order of the ranks, the same tree as `fold_pairs`.

        Each rank adds up one chunk of the vector: an all-to-all and an all-gather move as many bytes as a ring
        all-reduce. May overwrite `flat`, and may return it.
        """
        if self.data_size == 1:
            return flat
        size, device = flat.numel(), flat.device
        flat = self._leave_device(flat)
        chunk = -(-size // self.data_size)
        sizes = [max(0, min(chunk, size - chunk * i)) for i in range(self.data_size)]
        mine = sizes[self._data_rank]
        received = flat.new_empty(mine * self.data_size)
        dist.all_to_all_single(received, flat, [mine] * self.data_size, sizes, group=self._group)
        part = fold_pairs(received.view(self.data_size, mine))
        even = chunk * self.data_size == size
        if mine < chunk:
            part = torch.nn.functional.pad(part, (0, chunk - mine))
        whole = flat if even else flat.new_empty(chunk * self.data_size)
        all_gather_flat(whole, part, self._group)
        return whole[:size].to(device)

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks; finite values and infinities only. Overwrites `values`."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_integers(self, values: Tensor) -> Tensor:
        """The elementwise sum of int64 over the ranks. Overwrites `values`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.data_size == 1:
            return values
        device, values = values.device, self._leave_device(values)
        dist.all_reduce(values, how, group=self._group)
        return values.to(device)

    def _leave_device(self, values: Tensor) -> Tensor:
        return values.cpu() if self._through_cpu else values
