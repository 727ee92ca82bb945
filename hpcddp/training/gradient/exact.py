"""Gradients that are the same, bit for bit, on any number of ranks.

The global batch is cut into K fixed slices. Each is a micro batch of its own, with random numbers keyed by (seed, step,
slice), the parameters and the buffers of the step's start, and its own gradient. All K are summed in one fixed way.
The number of ranks decides which rank computes a slice, but neither its content nor its place in the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import LaunchError, RequestError
from hpcddp.training.collectives import ask_all
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.buffers import frozen_statistics
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.parallel.layout import Layout, spread_weights
from hpcddp.training.parallel.sharded import WrapOptions
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import NormWithStatistics, add_to_each, all_gather_flat, largest_magnitudes
from hpcddp.training.versions import list_conditions, name_differences

_SIGNIFICANT_BITS = 56  # of a number in IntegerSum
_AT_ONCE = 1 << 22  # numbers that are summed in one exchange
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")

# ---- sums over the data ranks, the same to the last bit with any library and network


def fold_pairs(rows: Tensor) -> Tensor:
    """The sum of the rows (count, n) by one fixed binary tree: T(x0, x1, x2, …) = T(x0 + x1, x2 + x3, …).

    An odd last row goes up unchanged. Overwrites `rows`.
    """
    while (count := rows.shape[0]) > 1:
        pairs = count // 2
        rows[0 : 2 * pairs : 2].add_(rows[1 : 2 * pairs : 2])
        rows = rows[0::2]
    return rows[0]


class Reducer:
    """Sums flat vectors over the data ranks. Each method is a collective, which every rank calls in the same order.

    gloo moves CPU memory only: with `through_cpu` vectors on a GPU are copied there first.
    """

    def __init__(self, layout: Layout, *, through_cpu: bool = False) -> None:
        self.data_size = layout.data_size
        self._data_rank = layout.data_rank
        self._group = layout.data_group
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


# ---- sums over the fixed slices of a global batch


class TreeSum:
    """One fixed binary tree, inside a rank over its slices and then over the ranks.

    The trees of two world sizes are the same sum if each rank has a power of two of slices (or all of them). At most
    log2 of them are kept at a time.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
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
        return self._reducer.sum_in_tree(flat)

    def clear(self) -> None:
        self._levels.clear()


class IntegerSum:
    """Integers on a grid that all slices share: addition is associative, so any split and any algorithm will do.

    Each tensor's grid follows from the largest magnitude in it over all slices, which must be known first: a rank keeps
    the tensors of all its slices.
    """

    def __init__(self, reducer: Reducer, slices: int) -> None:
        self._reducer = reducer
        self._bits = min(_SIGNIFICANT_BITS, 62 - slices.bit_length())  # the sum of all slices stays below 2^62
        self._slices: list[list[Tensor]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """A slice that is not the rank's last; takes the tensors over."""
        self._slices.append(tensors)

    def total(self, indices: Sequence[int], last: list[Tensor], flat: Tensor) -> Tensor:
        """The sum, as of TreeSum; a tensor with a NaN or an infinity in any slice becomes NaN throughout."""
        slices = [[tensors[index] for index in indices] for tensors in self._slices] + [last]
        peaks = torch.stack([largest_magnitudes(tensors) for tensors in slices])
        peak = self._reducer.largest(torch.where(peaks.isfinite(), peaks, torch.inf).amax(0))
        _, exponent = torch.frexp(torch.where(peak.isfinite(), peak, 1.0))
        scale = torch.ldexp(torch.ones_like(peak), (self._bits - exponent).clamp(max=1000))
        units = self._reducer.sum_integers(
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
        self._slices.clear()


def make_sum(method: str, reducer: Reducer, slices: int) -> TreeSum | IntegerSum:
    """`method` is "tree" or "integer". RequestError for a tree that another world size would grow differently."""
    if method == "integer":
        return IntegerSum(reducer, slices)
    data_size = reducer.data_size
    each, rest = divmod(slices, data_size)
    if data_size > 1 and (rest or each & (each - 1)):
        fits = [w for w in range(1, slices + 1) if slices % w == 0 and not (slices // w) & (slices // w - 1)]
        raise RequestError(
            f"the tree over {slices} slices cannot be shared by {data_size} ranks: each needs a power of two of them",
            f"use {' or '.join(map(str, sorted({1, *fits})))} ranks, or exact='integer' from the first run on",
        )
    return TreeSum(reducer)


class SliceBuffers:
    """The buffers of all models of a run that change in a forward pass, such as BatchNorm's running statistics.
    `end_slice` is a collective with the last slice of a step."""

    def __init__(self, changes: TreeSum | IntegerSum, slices: int) -> None:
        self._changes = changes
        self._slices = slices
        self._buffers: list[Tensor] = []
        self._start: list[Tensor] = []

    def watch(self, model: nn.Module, *, statistics_only: bool = False) -> None:
        """Take a model's buffers in, or only those with running statistics; flags (bool) are left alone."""
        layers = [m for m in model.modules() if isinstance(m, NormWithStatistics)] if statistics_only else [model]
        buffers = dict.fromkeys(buffer for layer in layers for buffer in layer.buffers())
        self._buffers += [buffer for buffer in buffers if buffer.dtype != torch.bool and buffer.numel()]

    def begin_step(self) -> None:
        self._changes.clear()
        self._start = [buffer.detach().clone() for buffer in self._buffers]

    def end_slice(self, micro: MicroBatch) -> None:
        """Note what this slice changed, and undo it; with the rank's last one, make the step's change."""
        if not self._buffers:
            return
        pairs = list(zip(self._buffers, self._start, strict=True))
        flat = torch.cat([(buffer.double() - start.double()).reshape(-1) for buffer, start in pairs])
        for buffer, start in pairs:
            buffer.copy_(start)
        if micro.samples == 0:  # also where the loop calls `model.train()`
            flat.zero_()
        sizes = [start.numel() for start in self._start]
        views = list(torch.split(flat, sizes))
        if not micro.last:
            self._changes.add(views)
            return
        # slices without samples changed nothing
        mean = self._changes.total(range(len(views)), views, flat) / min(self._slices, micro.total)
        for buffer, change in zip(self._buffers, torch.split(mean, sizes), strict=True):
            buffer.copy_(buffer.double() + change.view_as(buffer))


class ExactGradients(Gradients):
    """The sum over a plan's fixed slices, each of whose losses is weighted by n / N.

    Each rank has the whole model, in no wrapper, and the gradients of its slices. Behind the last one all are summed.
    """

    def __init__(self, group: Group, layout: Layout, slices: int, method: str) -> None:
        self.slots = slices
        self._device = group.device
        self._layout = layout
        self._models: list[nn.Module] = []
        self._untrained: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._used: set[int] = set()  # indices of those that some slice of this rank has used in this step
        self._reducer = Reducer(layout, through_cpu=group.backend != "nccl" and group.device.type == "cuda")
        self._sum = make_sum(method, self._reducer, slices)
        self._buffers = SliceBuffers(make_sum(method, self._reducer, slices), slices)
        self._aside: list[tuple[nn.Parameter, Tensor]] = []  # gradients from before this pass

    def wrap(self, model: nn.Module, _wanted: WrapOptions) -> nn.Module:
        check_layers(model)
        model = model.to(self._device)
        spread_weights(model, self._device, self._layout)
        known = set(self._parameters)
        self._parameters += [p for p in model.parameters() if p.requires_grad and p not in known]
        self._models.append(model)
        self._buffers.watch(model)
        return model

    def add_untrained(self, model: nn.Module) -> None:
        self._untrained.append(model)
        self._buffers.watch(model, statistics_only=True)

    @contextmanager
    def micro(self, micro: MicroBatch) -> Iterator[None]:
        """Around forward and backward of one slice; one without samples leaves BatchNorm's statistics."""
        if micro.nth == 0:
            self._sum.clear()
            self._used.clear()
            self._buffers.begin_step()
            self._set_aside()
        with ExitStack() as stack:
            for model in (*self._models, *self._untrained) if micro.samples == 0 else ():
                stack.enter_context(frozen_statistics(model))
            yield

    def _set_aside(self) -> None:
        self._aside = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in self._aside:
            parameter.grad = None

    def pass_ends(self) -> None:
        aside, self._aside = self._aside, []
        for parameter, before in aside:
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    def collect(self, micro: MicroBatch) -> None:
        """Take this slice's gradients away, or with the last one leave the sum of all slices."""
        self._buffers.end_slice(micro)
        taken = self._take_gradients()
        if micro.samples == 0:  # it only keeps the ranks in step
            taken = [gradient.zero_() for gradient in taken]
        if micro.last:
            self._sum_up(taken)
        else:
            self._sum.add(taken)

    def _take_gradients(self) -> list[Tensor]:
        """Take this slice's gradients from the parameters; zeros for a parameter that the slice did not use."""
        taken = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._used.add(index)
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return taken

    def _sum_up(self, last: list[Tensor]) -> None:
        """Give each parameter the gradient of the global batch, if any slice of any rank has one for it."""
        used = torch.zeros(len(last), dtype=torch.int64, device=self._device)
        used[sorted(self._used)] = 1
        total = self._reducer.sum_integers(used).tolist()
        for indices in _group_alike(last, [index for index, count in enumerate(total) if count]):
            gradients = [last[index] for index in indices]
            if self._layout.data_size == 1:
                self._sum.total(indices, gradients, gradients[0])
            else:
                sizes = [gradient.numel() for gradient in gradients]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                parts = zip(torch.split(flat, sizes), gradients, strict=True)
                flat = self._sum.total(indices, [part.view(gradient.shape) for part, gradient in parts], flat)
                # in the memory order that they have on one rank: that of a norm's sum
                for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
                    gradient.copy_(part.view(gradient.shape))
            for index, gradient in zip(indices, gradients, strict=True):
                self._give(index, gradient)
        self._sum.clear()

    def _give(self, index: int, gradient: Tensor) -> None:
        self._parameters[index].grad = gradient


def _group_alike(tensors: list[Tensor], indices: list[int]) -> Iterator[list[int]]:
    """The indices in turn, in groups of one type and not too many numbers."""
    group: list[int] = []
    for index in indices:
        tensor = tensors[index]
        held = sum(tensors[other].numel() for other in group)
        if group and (tensors[group[0]].dtype != tensor.dtype or held + tensor.numel() > _AT_ONCE):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def check_layers(model: nn.Module) -> None:
    """RequestError for a layer whose numbers depend on the ranks."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise RequestError(
            "SyncBatchNorm takes statistics over the ranks, which an exact run must not depend on",
            "use BatchNorm: in exact mode its statistics are those of a slice, on any number of ranks",
        )


# ---- the start of an exact run


@contextmanager
def deterministic_kernels(env: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the body torch uses deterministic kernels, and raises an error where it has none.

    LaunchError if CUBLAS_WORKSPACE_CONFIG allows cuBLAS another order. CPU kernels split their sums by threads, so
    that torch gets one thread.
    """
    if env.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
        raise LaunchError(
            f"{_WORKSPACE}={env[_WORKSPACE]!r} lets cuBLAS add in any order, which exact mode cannot use",
            f"unset {_WORKSPACE}, or export {_WORKSPACE}={_WORKSPACES[0]}",
        )
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    memory.fill_uninitialized_memory = False  # it takes time, and no memory is read here before it is written
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fills


def check_same_conditions(group: Group) -> None:
    """LaunchError if the ranks have different hardware or software. A collective."""
    conditions = ask_all(list_conditions(group.device), group.world_size)
    for rank, theirs in enumerate(conditions):
        if differs := name_differences(conditions[0], theirs):
            host = group.members[rank].host
            raise LaunchError(
                "exact mode needs the same hardware and software on every rank;"
                f" on rank {rank} ({host}) {differs[0]} as on rank 0",
                "ask for nodes of one kind (a constraint in the job file), and use one environment for all ranks",
            )
