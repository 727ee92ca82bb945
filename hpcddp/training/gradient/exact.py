"""Gradients that are the same, bit for bit, on any number of ranks.

The global batch is cut into K fixed slices. Each is a micro batch of its own, with random numbers keyed by (seed, step,
slice), the parameters and the buffers of the step's start, and its own gradient; all K are added in one fixed way
(slicesum.py). The number of ranks decides who computes a slice, never what is in it nor in which order it is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.gradient.buffers import frozen_statistics
from hpcddp.training.gradient.exchange import Exchange
from hpcddp.training.gradient.gradients import wrap_ddp
from hpcddp.training.gradient.slicebuffers import SliceBuffers
from hpcddp.training.gradient.slicesum import make_sum
from hpcddp.training.samples.sampler import MicroBatch


class ExactGradients:
    """As DdpGradients, for a plan with fixed slices. DDP buckets the gradients and hands them over during backward."""

    buffers_differ = False
    meets_in_forward = False
    averaged_over = 1  # the slices' gradients are summed, and a slice's loss is weighted by n / N

    def __init__(self, group: Group, plan: BatchPlan, method: str) -> None:
        if plan.slices is None:
            raise RequestError("exact sums need a plan with slices", "plan_batch(…, slices=8)")
        self.slots = plan.slices
        self._group = group
        self._models: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._places: dict[nn.Parameter, int] = {}
        self._used: set[int] = set()  # by an earlier slice of this step
        self._may_be_unused = False  # whether DDP is to look for parameters that a slice does not use
        on_cpu = group.backend != "nccl"
        # a group of its own, on which a thread sums buckets one after the other while backward goes on
        ranks: Any = dist.new_group(backend="gloo") if on_cpu and group.world_size > 1 else None
        exchange = Exchange(group.world_size, group.rank, ranks, through_cpu=on_cpu and group.device.type == "cuda")
        self._sum = make_sum(method, exchange, plan.slices)
        self._buffers = SliceBuffers(make_sum(method, exchange, plan.slices), plan.slices)
        self._failure: BaseException | None = None
        self._thread = ThreadPoolExecutor(1) if on_cpu and group.world_size > 1 else None
        self._stream: Any = None if on_cpu else torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def wrap(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """The model (on its device already) as the loop is to use it: bare at world size 1."""
        for layer in model.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise RequestError(
                    "SyncBatchNorm takes statistics over the ranks, which an exact run must not depend on",
                    "use BatchNorm: in exact mode its statistics are those of a slice, on any number of ranks",
                )
        wrapped = model
        self._may_be_unused |= bool(options.get("find_unused_parameters"))
        if self._group.world_size > 1:
            wrapper = wrap_ddp(model, self._group.device, options)
            # a lambda: DDP refuses annotations that it cannot read, and ours are strings
            wrapper.register_comm_hook(None, lambda _state, bucket: self._sum_bucket(bucket))
            wrapped = wrapper
        self._models.append(wrapped)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self._places:
                self._places[parameter] = len(self._parameters)
                self._parameters.append(parameter)
        self._buffers.watch(model)
        return wrapped

    def check(self, objects: dict[str, Any]) -> None:
        """Nothing to refuse: wrapping replaces no parameter."""

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
        if micro.nth == 0:
            self._sum.clear()
            self._used.clear()
            self._buffers.begin_step()
            for parameter in self._parameters:
                parameter.grad = None
        if micro.last and self._may_be_unused:
            for place in self._used:  # DDP has seen it used, and wants a gradient even if the last slice has none
                self._parameters[place].grad = torch.zeros_like(self._parameters[place])
        with self._passes(micro):
            yield
        if self._failure is not None:
            raise self._failure
        self._buffers.end_slice(micro)
        if not micro.last:
            self._sum.add(self._take_gradients())
        elif self._group.world_size == 1:
            self._sum_alone()

    @contextmanager
    def _passes(self, micro: MicroBatch) -> Iterator[None]:
        with frozen_statistics(nn.ModuleList(self._models)) if micro.samples == 0 else nullcontext():
            wrappers = [m for m in self._models if isinstance(m, DistributedDataParallel)]
            before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
            for wrapper in wrappers:
                wrapper.require_backward_grad_sync = micro.last  # what no_sync() does, for all of them at once
            yield
            for wrapper, value in zip(wrappers, before, strict=True):
                wrapper.require_backward_grad_sync = value

    def _take_gradients(self) -> list[Tensor]:
        """This slice's, which the parameters give up; zeros for a parameter that the slice did not use."""
        taken = []
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._used.add(place)
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self._drop_signs_of_zero(taken)
        return taken

    def _drop_signs_of_zero(self, gradients: list[Tensor]) -> None:
        """0 + -0 is 0: which slices of a rank are added to zeros must not show."""
        if self._may_be_unused and gradients:
            torch._foreach_add_(gradients, 0.0)

    def _sum_alone(self) -> None:
        """What DDP's hook does bucket by bucket where there are several ranks."""
        places = [
            place
            for place, parameter in enumerate(self._parameters)
            if parameter.grad is not None or place in self._used
        ]
        for place in places:
            if self._parameters[place].grad is None:
                self._parameters[place].grad = torch.zeros_like(self._parameters[place])
        gradients = [gradient for place in places if (gradient := self._parameters[place].grad) is not None]
        if gradients:
            self._drop_signs_of_zero(gradients)
            self._sum.total(places, gradients, gradients[0])

    def _sum_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook (torch.distributed.GradBucket): the last slice's gradients of some parameters."""
        flat = bucket.buffer()
        parameters = bucket.parameters()
        places = [self._places[parameter] for parameter in parameters]
        parts = torch.split(flat, [parameter.numel() for parameter in parameters])
        views = [_lay_out(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._drop_signs_of_zero(views)
        if self._thread is not None:
            summed: torch.futures.Future[Tensor] = torch.futures.Future()
            self._thread.submit(self._settle, summed, places, views, flat)
            return summed
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            summed = torch.futures.Future(devices=[flat.device])
            summed.set_result(self._sum.total(places, views, flat))
        return summed

    def _settle(
        self, summed: torch.futures.Future[Tensor], places: Sequence[int], views: list[Tensor], flat: Tensor
    ) -> None:
        """On the thread. DDP has to get a tensor; what went wrong is raised where the loop can see it."""
        try:
            flat = self._sum.total(places, views, flat)
        except BaseException as error:
            self._failure = error
        summed.set_result(flat)

    def close(self) -> None:
        """End the thread; before the process group goes."""
        if self._thread is not None:
            self._thread.shutdown()


def _lay_out(part: Tensor, parameter: Tensor) -> Tensor:
    """A bucket's part in the shape and memory order that DDP gives this parameter's gradient.

    (`GradBucket.gradients()` has the order wrong for channels_last.)
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    if strides == parameter.stride():  # dense: DDP keeps its order
        return part.as_strided(parameter.size(), strides, part.storage_offset())
    return part.view(parameter.size())
