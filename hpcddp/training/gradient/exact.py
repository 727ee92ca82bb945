"""Gradients that are the same, bit for bit, on any number of ranks.

The global batch is cut into K fixed slices. Each is a micro batch of its own, with random numbers keyed by (seed, step,
slice), the parameters and the buffers of the step's start, and its own gradient. All K are summed in one fixed way
(slice_sum.py). The number of ranks decides which rank computes a slice, but neither its content nor its place in the
sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.gradient.buffers import frozen_statistics
from hpcddp.training.gradient.exchange import Exchange
from hpcddp.training.gradient.slice_buffers import SliceBuffers
from hpcddp.training.gradient.slice_sum import make_sum
from hpcddp.training.parallel.layout import Layout, open_data_group
from hpcddp.training.parallel.replicated import wrap_ddp
from hpcddp.training.parallel.sharded import Wanted
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import add_to_each

#: What is wrong, and what to type, where a second backward pass in one batch comes too late.
TWICE = (
    "rt.backward(loss) reached a model twice in one batch, and an exact run on several ranks takes its gradients once",
    "rt.backward(a + b)",
)


class ExactGradients:
    """The sum over a plan's fixed slices. DDP collects gradients in buckets and passes them on during backward."""

    staged = None
    buffers_differ = False
    adds_up_in_place = False
    forward_is_collective = False
    averaged_over = 1  # the slices' gradients are summed, and a slice's loss is weighted by n / N

    def __init__(self, group: Group, layout: Layout, slices: int, method: str) -> None:
        self.slots = slices
        self._device = group.device
        self._layout = layout
        self._models: list[nn.Module] = []
        self._untrained: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._indices: dict[nn.Parameter, int] = {}
        self._used: set[int] = set()  # by an earlier slice of this step
        self._may_be_unused = False  # whether DDP is to look for parameters that a slice does not use
        on_cpu = group.backend != "nccl"
        several = layout.data_size > 1
        # a group of its own: a thread sums buckets in it one after the other while backward runs
        ranks = open_data_group(layout, "gloo") if on_cpu and several else layout.data_group
        self._exchange = Exchange(layout, ranks, through_cpu=on_cpu and group.device.type == "cuda")
        self._sum = make_sum(method, self._exchange, slices)
        self._buffers = SliceBuffers(make_sum(method, self._exchange, slices), slices)
        self._is_last = True  # whether this is the last slice of the step
        self._summed: set[int] = set()  # indices that DDP has passed on in this step
        self._in_buckets = False  # whether DDP has laid this slice's gradients into its buckets
        self._failure: BaseException | None = None
        self._thread = ThreadPoolExecutor(1) if on_cpu and several else None
        self._stream: Any = None if on_cpu else torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def wrap(self, model: nn.Module, wanted: Wanted) -> nn.Module:
        """The model on its device, in DDP where there are several data ranks."""
        check_layers(model)
        wrapped = model = model.to(self._device)
        self._may_be_unused |= bool(wanted.options.get("find_unused_parameters"))
        if self._layout.data_size > 1:
            wrapper = wrap_ddp(model, self._device, self._layout, wanted.options)
            # a lambda: DDP refuses annotations that it cannot read, and ours are strings
            wrapper.register_comm_hook(None, lambda _state, bucket: self._sum_bucket(bucket))
            wrapped = wrapper
        self._models.append(wrapped)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self._indices:
                self._indices[parameter] = len(self._parameters)
                self._parameters.append(parameter)
        self._buffers.watch(model)
        return wrapped

    def take_along(self, model: nn.Module) -> None:
        self._untrained.append(model)
        self._buffers.watch(model, statistics_only=True)

    def hand_over(self, optimizers: Iterable[Optimizer]) -> None:
        """Wrapping replaces no parameter."""

    def check(self, objects: dict[str, Any]) -> None:
        """Any object will do: wrapping replaces no parameter."""

    def key(self, micro: MicroBatch) -> tuple[int | str, ...]:
        """What random numbers depend on, beside seed and step."""
        return "slice", self.slot(micro)

    def slot(self, micro: MicroBatch) -> int:
        """Which of the `slots` the micro batch's loss goes into."""
        if micro.slice is None:
            raise RequestError("this micro batch is no slice", "take the batches of rt.loader(…)")
        return micro.slice

    @contextmanager
    def micro(self, micro: MicroBatch) -> Iterator[None]:
        """Around forward and backward of one slice."""
        self._is_last, self._in_buckets = micro.last, False
        if micro.nth == 0:
            self._sum.clear()
            self._used.clear()
            self._summed.clear()
            self._buffers.begin_step()
            for parameter in self._parameters:
                parameter.grad = None
        if micro.last and self._may_be_unused:
            for index in self._used:  # DDP has seen it used, and wants a gradient even if the last slice has none
                self._parameters[index].grad = torch.zeros_like(self._parameters[index])
        with self._passes(micro):
            yield

    def backward_ends(self, micro: MicroBatch) -> None:
        """DDP has its hook for that."""

    def collect(self, micro: MicroBatch) -> None:
        """Take this slice's gradients away, or with the last one leave the sum of all slices."""
        if self._failure is not None:
            raise self._failure
        self._buffers.end_slice(micro)
        if not micro.last:
            self._sum.add(self._take_gradients())
        elif self._layout.data_size == 1:
            self._sum_alone()

    @contextmanager
    def _passes(self, micro: MicroBatch) -> Iterator[None]:
        """DDP passes gradients on with the last slice only; a slice without samples leaves BatchNorm's statistics."""
        with ExitStack() as stack:
            for model in self._models:
                if isinstance(model, DistributedDataParallel) and not micro.last:
                    stack.enter_context(model.no_sync())
            if micro.samples == 0:
                for model in (*self._models, *self._untrained):
                    stack.enter_context(frozen_statistics(model))
            yield

    def _take_gradients(self) -> list[Tensor]:
        """This slice's, which the parameters give up; zeros for a parameter that the slice did not use."""
        taken = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._used.add(index)
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        if self._in_buckets:  # the next slice's may come into the same memory
            taken = [gradient.clone() for gradient in taken]
        self._drop_signs_of_zero(taken)
        return taken

    def _drop_signs_of_zero(self, gradients: list[Tensor]) -> None:
        """0 + -0 is 0: the result must not show which slices of a rank were added to zeros."""
        if self._may_be_unused and gradients:
            add_to_each(gradients, 0.0)

    def _sum_alone(self) -> None:
        """What DDP's hook does bucket by bucket where there are several ranks."""
        indices = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None or index in self._used
        ]
        for index in indices:
            if self._parameters[index].grad is None:
                self._parameters[index].grad = torch.zeros_like(self._parameters[index])
        gradients = [gradient for index in indices if (gradient := self._parameters[index].grad) is not None]
        if gradients:
            self._drop_signs_of_zero(gradients)
            self._sum.total(indices, gradients, gradients[0])

    def _sum_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook (torch.distributed.GradBucket): the last slice's gradients of some parameters.

        An earlier slice's come too if the model was called between the steps and nothing went backward from there, as
        in an evaluation without `torch.no_grad()`: DDP waits for that still. They are not summed.
        """
        flat = bucket.buffer()
        parameters = bucket.parameters()
        indices = [self._indices[parameter] for parameter in parameters]
        if not self._is_last or not self._summed.isdisjoint(indices):
            self._in_buckets = True
            if self._is_last:
                self._failure = RequestError(*TWICE)
            same: torch.futures.Future[Tensor] = torch.futures.Future()
            same.set_result(flat)
            return same
        self._summed.update(indices)
        parts = torch.split(flat, [parameter.numel() for parameter in parameters])
        views = [_lay_out(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._drop_signs_of_zero(views)
        if self._thread is not None:
            summed: torch.futures.Future[Tensor] = torch.futures.Future()
            self._thread.submit(self._settle, summed, indices, views, flat)
            return summed
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            summed = torch.futures.Future(devices=[flat.device])
            summed.set_result(self._sum.total(indices, views, flat))
        return summed

    def _settle(
        self, summed: torch.futures.Future[Tensor], indices: Sequence[int], views: list[Tensor], flat: Tensor
    ) -> None:
        """On the thread. DDP needs a tensor in any case; an error is raised later, in the training loop's thread."""
        try:
            flat = self._sum.total(indices, views, flat)
        except BaseException as error:
            self._failure = error
        summed.set_result(flat)

    def close(self) -> None:
        """End the thread; before the process group goes."""
        if self._thread is not None:
            self._thread.shutdown()


def check_layers(model: nn.Module) -> None:
    """RequestError for a layer whose numbers depend on the ranks."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise RequestError(
            "SyncBatchNorm takes statistics over the ranks, which an exact run must not depend on",
            "use BatchNorm: in exact mode its statistics are those of a slice, on any number of ranks",
        )


def _lay_out(part: Tensor, parameter: Tensor) -> Tensor:
    """A bucket's part in the shape and memory order that DDP gives this parameter's gradient.

    (`GradBucket.gradients()` has the order wrong for channels_last.)
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    if strides == parameter.stride():  # dense: DDP keeps its order
        return part.as_strided(parameter.size(), strides, part.storage_offset())
    return part.view(parameter.size())
