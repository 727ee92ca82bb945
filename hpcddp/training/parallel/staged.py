"""One stage of a model in a pipeline: its forward pass begins with what the stage before sends, and ends at the next.

The model's own forward runs on every rank. Before the rank's stage, and after it, it computes with shapes only. At the
module that the stage begins with, the numbers of the stage before take the place of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcddp.errors import RequestError
from hpcddp.training.parallel.averaging import average_gradients
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.penalties import find_penalty
from hpcddp.training.parallel.shapes_only import CHAIN, ShapesApart, list_tensors, map_tensors
from hpcddp.training.parallel.stage_links import StageLinks
from hpcddp.training.parallel.stages import as_shape

LOOP = "for step in loader.steps(): rt.train_step(step, loss_of); optimizer.step(), with a loss_of(batch) that calls it"

_CHECKED_FIRST = 2  # micro batches whose loss is looked at


class HandedOn(BaseException):
    """The model was called on a rank whose stage is not the last: what follows needs its output, and is done there.

    No Exception, which a script may catch.
    """


class Passed(NamedTuple):
    """A micro batch that has gone forward through this stage: what came, what was sent on, the last one's result."""

    received: list[Tensor]
    sent: list[Tensor]
    reseed: Callable[[], None]
    result: Any = None


class StagedModel:
    """The model of a run whose stages are on different ranks."""

    def __init__(
        self,
        model: nn.Module,
        links: StageLinks,
        names: Sequence[str],
        layout: Layout,
        schedule: str,
        *,
        is_sharded: bool,
    ) -> None:
        self.module = model
        self.links = links
        self.schedule = schedule
        self.is_sharded = is_sharded  # over several data ranks
        self._layout = layout
        self._names = names
        self._kind = type(model).__name__
        self._apart = ShapesApart()
        self._trains = False  # a micro batch goes forward to be trained on
        self._reseed: Callable[[], None] = lambda: None
        self._calls = 0  # of the model, for the micro batch
        self._inside = self._entered = self._left = False  # of the model; where its forward pass is
        self._received: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._outputs: list[Tensor] = []  # of the model
        self._checked = 0  # losses
        self._back: Passed | None = None  # the micro batch that goes backward
        modules = dict(model.named_modules())
        if not links.is_first:
            modules[names[links.stage - 1]].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if not links.is_last:
            modules[names[links.stage]].register_forward_pre_hook(self._leave, prepend=True, with_kwargs=True)
        self._forward = model.forward
        vars(model)["forward"] = self._call  # in place, as torch's `fully_shard` works: names stay
        model.register_forward_hook(self._end)

    # ---- a micro batch of training

    def forward(self, compute: Callable[[], Any], reseed: Callable[[], None]) -> Passed:
        """`compute()`, which calls the model once; its result is there on the last stage only.

        `reseed` comes where a later stage begins: it draws other random numbers than the first.
        """
        self._trains, self._reseed, self._calls = True, reseed, 0
        self._received, self._sent = [], []
        result = None
        try:
            with self._apart:
                result = compute()
            if not self._calls or not self.links.is_last:
                raise RequestError(f"loss_of(batch) did not call the {self._kind} that rt.prepare returned", LOOP)
            self._check_loss(result)
        except HandedOn:
            pass
        finally:
            self._trains, self._outputs = False, []
        return Passed(self._received, self._sent, reseed, result)

    def _check_loss(self, loss: Any) -> None:
        """In the first micro batches. RequestError for a loss of which another stage would have to know a part."""
        self._checked += 1
        if self._checked > _CHECKED_FIRST or not isinstance(loss, Tensor):
            return
        name = find_penalty(loss, self._outputs, self._received, self.module)
        if name is not None:
            raise RequestError(
                f"loss_of(batch) takes a number of {name} itself beside the output of the {self._kind}, as a penalty on"
                " parameters does, and here it has the parameters of the pipeline's last stage only",
                "the optimizer's weight_decay in place of the penalty: torch.optim.AdamW(…, weight_decay=0.01); or"
                ' hpcddp.runtime(parallel="fsdp")',
            )

    @contextmanager
    def going_back(self, passed: Passed) -> Iterator[None]:
        """Around the backward pass of a micro batch, which may compute layers again (torch.utils.checkpoint)."""
        self._back = passed
        try:
            yield
        finally:
            self._back = None

    def backward(self, passed: Passed) -> None:
        """From the gradients that the next stage sends, on a stage before the last."""
        outputs = [tensor for tensor in passed.sent if tensor.requires_grad]
        gradients = self.links.receive_back(outputs)
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def send_back(self, passed: Passed) -> None:
        """The gradients of what came from the stage before, once this stage's backward pass is over."""
        wanted = [tensor for tensor in passed.received if tensor.requires_grad]
        if wanted:
            self.links.send_back([torch.zeros_like(t) if t.grad is None else t.grad for t in wanted])

    @property
    def whole(self) -> list[nn.Module]:
        """The model, if no other data rank has a part of its parameters."""
        return [] if self.is_sharded else [self.module]

    def exchange(self, is_last: bool) -> None:
        """The next backward pass of a step comes: a sharded stage exchanges gradients in the last only.

        Until then the model's own parameters stay whole: no output of the model, but that of the last stage, would have
        them gathered again for a backward pass.
        """
        sharded: Any = self.module  # `fully_shard` has given it these methods
        if self.is_sharded:
            sharded.set_requires_gradient_sync(is_last)
            sharded.set_reshard_after_backward(is_last, recurse=False)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Around all passes of a step: the gradients that they bring become the mean over the data ranks."""
        if self.is_sharded:
            yield
            return
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        yield
        average_gradients(trained, self._layout)
        for parameter, old in zip(trained, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    # ---- one call of the model

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._trains and torch.is_grad_enabled():
            raise RequestError(
                f"the {self._kind} was called outside of rt.train_step, and the ranks have a stage of it each: its"
                " micro batches go through the stages together",
                f"{LOOP}; to evaluate: with torch.no_grad(): model(x)",
            )
        if self._trains and self._calls:
            raise RequestError(
                f"loss_of(batch) called the {self._kind} twice, and a micro batch goes through the stages of a pipeline"
                " once",
                "one call, of both inputs joined: model(torch.cat((a, b)))",
            )
        self._calls += 1
        self._entered, self._left = self.links.is_first, False
        self._inside, self._apart.passes_over = True, not self.links.is_first
        try:
            with ExitStack() as stack:
                if not self._trains:
                    stack.enter_context(self._apart)
                outputs = self._forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not self._apart.passes_over and "meta" not in str(error):
                raise
            raise RequestError(
                f"the forward pass of the {self._kind} needs what another stage of the pipeline has:"
                f" {' '.join(str(error).splitlines()[:1])}",
                CHAIN,
            ) from error
        finally:
            self._inside = self._apart.passes_over = False
        self._check_came_by()
        if self.links.is_last and any(tensor.is_meta for tensor in list_tensors(outputs)):
            raise RequestError(f"the output of the {self._kind} was computed in another stage than the last", CHAIN)
        return outputs

    def _end(self, _model: nn.Module, _inputs: Any, outputs: Any) -> Any:
        """The model's call is over: the next stage goes on, or all get the output."""
        if self._trains:
            if not self.links.is_last:
                raise HandedOn
            self._outputs = list_tensors(outputs)
            return outputs
        self.links.settle()
        shared = iter(self.links.share(list_tensors(outputs)))
        return outputs if self.links.is_last else map_tensors(outputs, lambda _: next(shared).detach())

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._back is not None:
            return self._put_in(self._back.received, self._back.reseed, args, kwargs)
        self._check_place(self._names[self.links.stage - 1], is_past=self._entered)
        self._received = self.links.receive(list_tensors((args, kwargs)))
        self._entered, self._apart.passes_over = True, False
        return self._put_in(self._received, self._reseed if self._trains else lambda: None, args, kwargs)

    def _put_in(self, received: Sequence[Tensor], reseed: Callable[[], None], args: Any, kwargs: Any) -> Any:
        reseed()
        came = iter(received)
        return map_tensors((args, kwargs), lambda _: next(came))

    def _leave(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._check_place(self._names[self.links.stage], is_past=self._left or not self._entered)
        sent = list_tensors((args, kwargs))
        if any(tensor.is_meta for tensor in sent):
            raise RequestError(
                f"{self._names[self.links.stage]} takes what a stage before stage {self.links.stage} of the pipeline"
                " has computed",
                CHAIN,
            )
        self.links.send_on(sent)
        self._sent, self._left, self._apart.passes_over = sent, True, True
        return map_tensors((args, kwargs), as_shape)

    def _check_place(self, name: str, *, is_past: bool) -> None:
        if not self._inside:
            raise RequestError(
                f"{name} was called outside of the {self._kind}, and a stage of the pipeline begins with it",
                "model(x), of the model that rt.prepare returned",
            )
        if is_past:
            raise RequestError(
                f"{name}, with which a stage of the pipeline begins, is called twice in a forward pass of the"
                f" {self._kind}, or before the stage in front of it",
                CHAIN,
            )

    def _check_came_by(self) -> None:
        for name, came_by in ((self.links.stage - 1, self._entered), (self.links.stage, self._left)):
            if not came_by and 0 <= name < len(self._names):
                raise RequestError(
                    f"the forward pass of the {self._kind} did not call {self._names[name]}, with which a stage of the"
                    " pipeline begins",
                    "name modules that each forward pass calls, once",
                )
