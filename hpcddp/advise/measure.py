"""A model's sizes and activations, found by one forward and backward pass on tensors without numbers.

The model is made on torch's device "meta", whose tensors have a shape, a type and no memory. It is run under torch's
FakeTensorMode, where such tensors take part in operators as on a CPU. What is alive at each operator is counted.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hpcddp.advise.memory import Activations, Model, Parameter, Stages
from hpcddp.advise.source import describe_error, reraise_as_request
from hpcddp.errors import RequestError
from hpcddp.uncaught import find_script_line

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that comes at least twice, has parts, and has most of the weights.

    Of two classes with the same weights the outer one. A module inside of another one of its class is none. Empty where
    no class comes twice: such a model is gathered in one piece.
    """
    found: dict[type, list[nn.Module]] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if issubclass(kind, _CONTAINERS):
            continue
        blocks = _outermost(model, kind)
        if len(blocks) > 1 and all(next(block.children(), None) is not None for block in blocks):
            found[kind] = blocks
    return max(found.values(), key=lambda blocks: sum(map(_elements, blocks)), default=[])


def _outermost(module: nn.Module, kind: type) -> list[nn.Module]:
    if type(module) is kind:
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def hint_of_pass(error: BaseException, shape: Sequence[int], *, tokens: bool) -> str:
    """Say what the model was given, where it failed, and the options for another input. `shape`: of the batch, with the
    samples in front."""
    given, numbers = f"--input {','.join(map(str, shape[1:]))}", "numbers"
    if tokens:
        given, numbers = f"--sequence {shape[1]}", "token numbers"
    where = find_script_line(error.__traceback__)
    return (
        f"its input was {given}, {numbers} of shape {tuple(shape)}{f'; the error is at {where}' if where else ''};"
        " token numbers: --sequence 1024; others: --input 3,224,224"
    )


class Sample:
    """The input of one sample: token numbers, or numbers of a shape."""

    def __init__(self, shape: tuple[int, ...], *, tokens: bool) -> None:
        self.shape = shape
        self.tokens = tokens

    def batch(self, size: int, dtype: torch.dtype) -> Tensor:
        """Make a batch of so many samples."""
        return torch.zeros((size, *self.shape), dtype=torch.long if self.tokens else dtype)


def measure_model(
    make: Callable[[], object], name: str, precision: str, sample: Sample | None, micro_batch: int, *, recompute: bool
) -> Model:
    """What `make()` returns, as the arithmetic needs it; without a sample without activations.

    RequestError where it raises, returns no module, or does not take the sample.
    """
    mode = FakeTensorMode()
    hint = f"{name} is called without arguments, on device meta: leave out what reads weights, and .cuda()"
    with torch.device("meta"), reraise_as_request(f"{name}() raised", hint):
        model = make()
    if not isinstance(model, nn.Module):
        what = f"{name}() returned {type(model).__name__}, not a torch.nn.Module"
        raise RequestError(what, f"end {name} with: return model")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise RequestError(f"{name}() has layers without weights yet (LazyLinear)", "nn.Linear(inputs, outputs)")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(f"the model of {name}() has nothing to train", f"in {name}: requires_grad_(True) on a layer")
    weights = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    with mode:
        _cast(model, weights)
    blocks = find_blocks(model)
    behind: set[nn.Parameter] = set()  # the blocks: where that is not measured, before them makes no difference
    whole = gathered = None
    if sample is not None:
        if recompute:
            _recompute(blocks)
        cast = torch.bfloat16 if precision == "bf16-mixed" else None
        with mode:
            whole, behind = _find_activations(model, blocks, sample, micro_batch, weights, autocast=cast is not None)
            gathered = whole
            if cast is not None:
                _cast(model, cast)
                gathered, behind = _find_activations(model, blocks, sample, micro_batch, cast, autocast=False)
    return _describe(model, name, blocks, behind, whole, gathered)


def _describe(
    model: nn.Module,
    name: str,
    blocks: list[nn.Module],
    behind: set[nn.Parameter],
    whole: Activations | None,
    gathered: Activations | None,
) -> Model:
    inside = [list(block.parameters()) for block in blocks]
    of_blocks = {parameter for block in inside for parameter in block}
    matrices = {id(m.weight) for block in blocks for m in block.modules() if isinstance(m, nn.Linear)}

    def sizes(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(p.numel(), p.shape[0] if p.dim() else 1, p.requires_grad, id(p) in matrices) for p in parameters
        )

    rest = [parameter for parameter in model.parameters() if parameter not in of_blocks]
    return Model(
        name=name,
        blocks=tuple(sizes(block) for block in inside),
        before=sizes([p for p in rest if p not in behind]),
        behind=sizes([p for p in rest if p in behind]),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        whole=whole,
        gathered=gathered,
        block=type(blocks[0]).__name__ if blocks else "",
    )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """New tensors in place of the model's, floating-point ones of this type. One that two modules share stays one."""
    made: dict[int, Tensor] = {}

    def renew(old: Any) -> Any:
        if not isinstance(old, Tensor):
            return old
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=dtype if old.is_floating_point() else old.dtype)
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            held.update({name: renew(value) for name, value in held.items()})


def _recompute(blocks: list[nn.Module]) -> None:
    """Activation checkpointing, as a script puts it around each block."""
    for block in blocks:
        inner = block.forward

        def forward(*args: Any, inner: Callable[..., Any] = inner, **named: Any) -> Any:
            return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **named)

        block.forward = forward  # the model is thrown away


def _find_activations(
    model: nn.Module, blocks: list[nn.Module], sample: Sample, micro_batch: int, dtype: torch.dtype, *, autocast: bool
) -> tuple[Activations, set[nn.Parameter]]:
    """A line through two sizes of the micro batch, and the parameters behind the blocks."""
    one, behind = _train_once(model, blocks, sample.batch(micro_batch, dtype), autocast=autocast)
    two, _ = _train_once(model, blocks, sample.batch(2 * micro_batch, dtype), autocast=autocast)
    none = Stages(0, 0, 0, 0, 0)
    slope = none.plus(two, 1 / micro_batch).plus(one, -1 / micro_batch)
    return Activations(one.plus(slope, -micro_batch), slope), behind


def _train_once(
    model: nn.Module, blocks: list[nn.Module], batch: Tensor, *, autocast: bool
) -> tuple[Stages, set[nn.Parameter]]:
    """Make one forward and backward pass. Gradients are freed as soon as they are complete."""
    live = _Live(model)
    behind: set[nn.Parameter] = set()

    def arrived(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        live.done += parameter.numel() * parameter.element_size()
        parameter.grad = None
        if live.stage == "loss" and blocks:
            behind.add(parameter)

    trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks: list[Any] = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in trained]
    if blocks:
        hooks += [blocks[-1].register_forward_hook(live.mark_forward_end)]
        hooks += [blocks[0].register_forward_hook(live.mark_backward_end)]
    by_onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # what its LSTM keeps cannot be seen
    try:
        with _explain_pass(batch), live:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = _make_loss(model(batch))
            if not blocks:
                live.stage = "loss"
            loss.backward()  # type: ignore[no-untyped-call]  # torch's, without types
    finally:
        torch._C._set_mkldnn_enabled(by_onednn)
        for hook in hooks:
            hook.remove()
    most = live.most
    last = most.get("last", most.get("backward", 0))
    return Stages(
        most["forward"], most["loss"], max(most.get("backward", 0), last), last, live.piled, live.casts
    ), behind


@contextmanager
def _explain_pass(batch: Tensor) -> Iterator[None]:
    """Errors of the forward and backward pass become RequestErrors, with what the model was given."""
    hint = partial(hint_of_pass, shape=tuple(batch.shape), tokens=not batch.is_floating_point())
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it logs the same error, with a line of torch
    try:
        with reraise_as_request("the model cannot be trained on its input:", hint):
            yield
    except RequestError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        raise RequestError(
            f"the model's forward pass reads numbers, and tensors have none here: {describe_error(error.__cause__)}",
            "leave out what reads them, such as .item(), float(x) and `if` on a tensor, in the model of this function",
        ) from error


def _make_loss(output: Any) -> Tensor:
    """Cross entropy over the last dimension of what the model gives, in 32 bit or 64; a sum where it has one."""
    if hasattr(output, "logits"):
        output = output.logits
    losses = []
    for found in tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()):
        if not isinstance(found, Tensor) or not found.is_floating_point() or not found.requires_grad:
            continue
        if found.dim() < 2:
            losses.append(_in_32_bit(found).sum())
            continue
        rows = found.flatten(0, -2)
        losses.append(nn.functional.cross_entropy(_in_32_bit(rows), torch.zeros(rows.shape[0], dtype=torch.long)))
    if not losses:
        raise RequestError("the model gives no tensor to train on", "return the logits from its forward()")
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _in_32_bit(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.float64 else numbers.float()


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types there
    """Counts the bytes of all storages that are alive, without those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._of_model = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._known: dict[int, weakref.ref[Any]] = {}
        self._now = self._casts = 0
        self.stage = "forward"
        self.most: dict[str, int] = {"forward": 0, "loss": 0}
        self.done = 0  # bytes of gradients that have arrived
        self.piled = 0
        self.casts = 0  # of autocast's copies of weights

    def mark_forward_end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Mark the end of the last block's forward pass: behind it comes the loss, until its gradient is there."""
        if self.stage == "forward":
            self.stage = "loss"
            _on_gradient(output, lambda: self._enter("backward"))

    def mark_backward_end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Mark the first block's gradient: what follows is the end of the backward pass."""
        if self.stage == "forward":
            _on_gradient(output, lambda: self._enter("last"))

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.most.setdefault(stage, self._now)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for found in tree_leaves(output):
            if isinstance(found, Tensor):
                cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._of_model
                self._count(found.untyped_storage(), cast=cast)
        self.most[self.stage] = max(self.most.get(self.stage, 0), self._now)
        self.piled = max(self.piled, self._now + self.done)
        return output

    def _count(self, storage: Any, *, cast: bool) -> None:
        key = storage._cdata
        if key in self._of_model or key in self._known:
            return
        size: int = storage.nbytes()

        def gone(_: Any) -> None:
            self._now -= size
            self._casts -= size * cast
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self._casts += size * cast
        self.casts = max(self.casts, self._casts)


def _on_gradient(output: Any, call: Callable[[], None]) -> None:
    for found in tree_leaves(output):
        if isinstance(found, Tensor) and found.requires_grad:
            found.register_hook(lambda _gradient: call())  # type: ignore[no-untyped-call]  # torch's, without types
            return
