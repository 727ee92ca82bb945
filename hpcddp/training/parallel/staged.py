"""One stage of a model in a pipeline: its forward pass begins with what the stage before sends, and ends at the next.

The model's own forward runs on every rank. Before the rank's stage, and after it, it computes with shapes only. At the
module that the stage begins with, the numbers of the stage before take the place of the arguments.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hpcddp.errors import RequestError, nearest
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.spread import as_bytes
from hpcddp.training.parallel.tensor import TensorPlan, fits, replicate
from hpcddp.training.parallel.zero import is_fresh, replace_parameters
from hpcddp.training.torch_compat import Node, combined_norms, is_single, leaf_of, list_inputs

# Penalties on parameters in the loss of a pipeline: the last stage computes it, and has its own parameters only.


class _Below(NamedTuple):
    """What a node of the graph is computed from."""

    has_data: bool  # of the batch, by the model's output or by what came from the stage before
    parameter: int | None  # the id of one with several numbers


def find_penalty(loss: Tensor, outputs: Iterable[Tensor], data: Iterable[Tensor], model: nn.Module) -> str | None:
    """The name of a parameter of which the loss takes one number that was computed from parameters alone.

    `data` are leaves of the graph that hold something of the batch.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.numel() > 1}
    ends = {tensor.grad_fn for tensor in outputs}
    leaves = {id(tensor) for tensor in data}
    below: dict[Node, _Below] = {}
    for node in _list_from_leaves(loss.grad_fn, ends):
        leaf = leaf_of(node)
        inputs = [] if node in ends else list_inputs(node)
        found = [below[earlier].parameter for earlier in inputs]
        below[node] = _Below(
            node in ends or id(leaf) in leaves or any(below[earlier].has_data for earlier in inputs),
            id(leaf) if id(leaf) in names else next((number for number in found if number is not None), None),
        )
        for earlier in inputs if below[node].has_data else ():
            part = below[earlier]
            if not part.has_data and part.parameter is not None and is_single(earlier):
                return names[part.parameter]
    return None


def _list_from_leaves(last: Node | None, ends: set[Node | None]) -> Sequence[Node]:
    """The nodes from which `last` was computed, each behind what it takes; not beyond the `ends`."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [] if last is None else [(last, False)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node not in ends:
                waiting.extend((earlier, False) for earlier in list_inputs(node))
    return order


# What a model computes outside of a rank's stage: shapes only, by torch's device "meta".


CHAIN = (
    "begin the stages where the model is a chain: what one stage computes reaches the next as an argument of the module"
    " that this begins with, and layers are made in the order in which they compute"
)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nested tuples, lists and dicts with each tensor changed, in their order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


def list_tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dicts, in their order."""
    return [*_walk(tree)]


def _walk(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _walk(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _walk(value)


class ShapesApart(TorchFunctionMode):
    """Keeps shapes and numbers apart. With `passes_over` a function of both gives shapes; else it is refused."""

    passes_over = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = {tensor.is_meta for tensor in _walk((args, kwargs))}
        if len(kinds) > 1:
            name = getattr(func, "__name__", str(func))
            if not self.passes_over or _changes_numbers(name, args):
                raise RequestError(
                    f"{name} takes what this stage of the pipeline computes together with what another one has", CHAIN
                )
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(torch.device("meta")))
        return func(*args, **kwargs)


def _changes_numbers(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the function writes shapes into a tensor of numbers."""
    in_place = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    in_place |= name.endswith("_") and not name.endswith("__")
    return in_place and bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta


# Where a model is cut into the stages of a pipeline, and what each stage keeps of it.


_EXAMPLE = 'rt.wrap(model, stages=["layers.4"]), or this list as the model\'s attribute pipeline_stages'


def find_stages(model: nn.Module, given: Sequence[str] | None, count: int) -> list[str]:
    """The names of the modules that the second and later of `count` stages begin with.

    RequestError for none, or for names that do not cut the model into so many.
    """
    names = getattr(model, "pipeline_stages", None) if given is None else given
    kind = type(model).__name__
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"the ranks are to have {count} stages of this {kind}, and nothing says where each begins", _EXAMPLE
        )
    if len(names) != count - 1:
        raise RequestError(
            f"stages={list(names)!r} cuts the {kind} into {len(names) + 1} stages, and there are {count}",
            f"name the {count - 1} modules at which the stages after the first begin",
        )
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            hint = f"names of model.named_modules(){nearest(name, known)}"
            raise RequestError(f"stages has {name!r}, and the {kind} has no such module", hint)
    if sorted(set(names), key=known.index) != list(names):
        raise RequestError(
            f"stages={list(names)!r} is not in the order of the {kind}'s modules",
            f"stages={sorted(set(names), key=known.index)!r}",
        )
    return list(names)


def keep_plan(model: nn.Module, plan: TensorPlan, names: Sequence[str], stage: int) -> TensorPlan:
    """Of a tensor plan what is for this stage, by whole names."""
    stages = _find_owners(model, names)
    return {path: style for key, style in plan.items() for path in stages if fits(path, key) and stages[path] == stage}


def keep_stage(model: nn.Module, names: Sequence[str], stage: int) -> list[weakref.ref[nn.Parameter]]:
    """Take from the model the parameters and buffers of all stages but this one; returns the parameters.

    The buffers of a module that holds the beginning of a stage, such as the model itself, stay on every stage.
    RequestError for a parameter of two stages, and for a stage without any that is trained.
    """
    stages = _find_owners(model, names)
    _check_apart(model, stages)
    _check_trained(model, names, stages)
    gone: list[weakref.ref[nn.Parameter]] = []
    for path, module in model.named_modules():
        if stages[path] == stage:
            continue
        for name, parameter in [*module.named_parameters(recurse=False)]:
            gone.append(weakref.ref(parameter))
            _take(module, module._parameters, name)
        for name, _ in [] if _holds_one(path, names) else [*module.named_buffers(recurse=False)]:
            module._non_persistent_buffers_set.discard(name)
            _take(module, module._buffers, name)
    return gone


def list_parts(model: nn.Module, names: Sequence[str], path: str = "") -> list[nn.Module]:
    """The largest modules with parameters that compute within one stage, to be sharded one by one.

    `fully_shard` of the whole model follows what goes in and out of it, which a stage in its middle never sees.
    """
    found = []
    for name, module in model.named_children():
        whole = f"{path}{name}"
        if _holds_one(whole, names) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += list_parts(module, names, f"{whole}.")
        elif next(module.parameters(), None) is not None:
            found.append(module)
    return found


def leave_out(optimizers: Iterable[Optimizer], gone: Sequence[weakref.ref[nn.Parameter]]) -> None:
    """Take other stages' parameters from optimizers that have not stepped yet. A parameter group may stay empty."""
    others = {id(parameter) for ref in gone if (parameter := ref()) is not None}
    for optimizer in optimizers:
        if is_fresh(optimizer):
            replace_parameters(optimizer, {}, others)


def as_shape(tensor: Tensor) -> Tensor:
    """The same tensor without numbers."""
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)


def _find_owners(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """The stage of each module, by its name."""
    found, stage = {}, 0
    for path, _ in model.named_modules():
        stage += path in names
        found[path] = stage
    return found


def _holds_one(path: str, names: Sequence[str]) -> bool:
    return not path or any(name.startswith(f"{path}.") for name in names)


def _list_named(model: nn.Module, stages: dict[str, int]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Each parameter by each of its names, with the stage of that name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        while path not in stages:  # a module that is registered twice is listed once
            path = path.rpartition(".")[0]
        yield name, parameter, stages[path]


def _check_apart(model: nn.Module, stages: dict[str, int]) -> None:
    first: dict[int, tuple[str, int]] = {}
    for name, parameter, stage in _list_named(model, stages):
        other, before = first.setdefault(id(parameter), (name, stage))
        if before != stage:
            raise RequestError(
                f"{other} and {name} are one parameter, and belong to two stages of the pipeline, {before} and {stage}",
                'a model whose stages share no parameter, or hpcddp.runtime(parallel="fsdp")',
            )


def _check_trained(model: nn.Module, names: Sequence[str], stages: dict[str, int]) -> None:
    trained = {stage for _, parameter, stage in _list_named(model, stages) if parameter.requires_grad}
    for stage in range(len(names) + 1):
        if stage not in trained:
            begin = f"from {names[stage - 1]} on" if stage else f"before {names[0]}"
            raise RequestError(
                f"stage {stage} of the pipeline, {begin}, has no parameter that is trained",
                "begin the stages at other modules, so that each has some",
            )


def _take(module: nn.Module, held: dict[str, Any], name: str) -> None:
    setattr(module, name, as_shape(held.pop(name)))


# What the stages of one pipeline send each other: outputs on to the next stage, their gradients back.


_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER = 256  # whole numbers that describe a message's tensors


class StageLinks:
    """This rank's stage in its pipeline, and the ranks of the stages beside it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """A collective: every rank takes part in making all groups."""
        lines = layout.lines_along("pipeline")
        nth = next(nth for nth, line in enumerate(lines) if layout.rank in line)
        groups: list[tuple[Any, Any]] = [(dist.new_group(line), dist.new_group(line)) for line in lines]
        self.group, self._back = groups[nth]
        self._line = lines[nth]
        self.stage = self._line.index(layout.rank)
        self.stages = len(self._line)
        self.device = device
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()  # message by message

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def is_beside_first(self) -> bool:
        """Whether rank 0 has the first stage of this pipeline."""
        return self._line[0] == 0

    def give(self, tensor: Tensor) -> None:
        """To the first stage, which `take`s it."""
        content = as_bytes(tensor.detach().to(self.device).contiguous())
        if content.numel():
            dist.send(content, self._line[0], group=self.group)

    def take(self, empty: Tensor, stage: int) -> Tensor:
        """What the stage gives, of this shape and type."""
        taken = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        if taken.numel():
            dist.recv(as_bytes(taken), self._line[stage], group=self.group)
        return taken

    def send_on(self, tensors: Sequence[Tensor]) -> None:
        """To the next stage. Does not wait for it."""
        self._send([_describe(tensors, self.device), *tensors], self._line[self.stage + 1], self.group)

    def receive(self, expected: Sequence[Tensor]) -> list[Tensor]:
        """From the stage before: tensors of the expected shapes."""
        before = self._line[self.stage - 1]
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, before, group=self.group)
        received = self._make_room(header, expected)
        for tensor in received:
            if tensor.numel():
                dist.recv(as_bytes(tensor.detach()), before, group=self.group)
        return received

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        """To the stage before, whose tensors of these shapes have taken part. Does not wait for it."""
        self._send(gradients, self._line[self.stage - 1], self._back)

    def receive_back(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the outputs, from the next stage."""
        gradients = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
        for gradient in gradients:
            if gradient.numel():
                dist.recv(as_bytes(gradient), self._line[self.stage + 1], group=self._back)
        return gradients

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the last stage, on all; the others give theirs as the expected shapes. A collective."""
        last = self._line[-1]
        header = _describe(tensors if self.is_last else [], self.device)
        dist.broadcast(header, last, group=self.group)
        shared = [t.detach().contiguous() for t in tensors] if self.is_last else self._make_room(header, tensors)
        for tensor in shared:
            if tensor.numel():
                dist.broadcast(as_bytes(tensor.detach()), last, group=self.group)
        return shared

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._end_oldest()

    def _send(self, tensors: Sequence[Tensor], rank: int, group: Any) -> None:
        contents = [as_bytes(tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
        self._sent.append([(dist.isend(content, rank, group=group), content) for content in contents])
        # the stages are never so far apart that the other does not take it before it needs something of this one
        while len(self._sent) > 4 * self.stages:
            self._end_oldest()

    def _end_oldest(self) -> None:
        for work, _ in self._sent.popleft():
            work.wait()

    def _make_room(self, header: Tensor, expected: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors for those that a header describes. RequestError if the shapes are others than expected."""
        described = _read(header.tolist())
        shapes = [shape for _, _, shape in described]
        if shapes != [tuple(tensor.shape) for tensor in expected]:
            raise RequestError(
                f"stage {self.stage} of the pipeline expects tensors of shapes"
                f" {[tuple(tensor.shape) for tensor in expected]}, and gets {shapes}",
                "a forward pass that computes the same on every stage: shapes that depend on the input's shapes only",
            )
        return [
            torch.empty(shape, dtype=dtype, device=self.device).requires_grad_(needs_gradient)
            for dtype, needs_gradient, shape in described
        ]


def _describe(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """(count, then of each: type, whether it takes a gradient, dimensions, shape)."""
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_TYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER:
        raise RequestError(
            f"one stage of the pipeline would give {len(tensors)} tensors to the next", "join them: torch.cat, or fewer"
        )
    return torch.tensor([*numbers, *[0] * (_HEADER - len(numbers))], device=device)


def _read(numbers: list[int]) -> list[tuple[torch.dtype, bool, tuple[int, ...]]]:
    count, *rest = numbers
    found = []
    for _ in range(count):
        dtype, needs_gradient, dimensions = rest[:3]
        found.append((_TYPES[dtype], bool(needs_gradient), tuple(rest[3 : 3 + dimensions])))
        rest = rest[3 + dimensions :]
    return found


# The mean of gradients over the data ranks, once all of a step are there.


_CHUNK = 1 << 24  # numbers that are added up at once


@torch.no_grad()
def average_gradients(trained: Sequence[nn.Parameter], layout: Layout) -> None:
    """A parameter without a gradient on a rank counts as zero there, and stays without one if no rank has one.

    If no rank has any, since no part of the global batch counts, all are zero, as in one process. A collective.
    """
    counts = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    if layout.data_size > 1:
        dist.all_reduce(counts, group=layout.data_group)
    found = counts.tolist()
    used = [p for p, count in zip(trained, found, strict=True) if count or not any(found)]
    for parameter in used:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for chunk in _chunks(used) if layout.data_size > 1 else ():
        gradients = [parameter.grad for parameter in chunk if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=layout.data_group)
        flat /= layout.data_size
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _chunks(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type each, in pieces of about `_CHUNK` numbers."""
    chunks: list[list[nn.Parameter]] = []
    left = 0
    for parameter in sorted(parameters, key=lambda p: str(p.dtype)):
        if not chunks or left <= 0 or chunks[-1][0].dtype != parameter.dtype:
            chunks.append([])
            left = _CHUNK
        chunks[-1].append(parameter)
        left -= parameter.numel()
    return chunks


LOOP = "for step in loader.steps(): rt.train_step(step, loss_of); optimizer.step(), with a loss_of(batch) that calls it"

_LOSSES_CHECKED = 2  # micro batches whose loss is looked at


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
        if self._checked > _LOSSES_CHECKED or not isinstance(loss, Tensor):
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


# The order in which a stage of a pipeline takes its micro batches.


SCHEDULES = ("1f1b", "gpipe")


def plan_turns(schedule: str, stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """(whether forward, micro batch) in the order in which a stage takes `count` micro batches.

    GPipe: all forward, then all backward. 1F1B: as soon as a micro batch can go back it does, so that a stage holds as
    many as there are stages behind it, at most.
    """
    ahead = count if schedule == "gpipe" else min(count, stages - 1 - stage)
    turns = [(True, nth) for nth in range(ahead)]
    for nth in range(ahead, count):
        turns += [(True, nth), (False, nth - ahead)]
    return turns + [(False, nth) for nth in range(count - ahead, count)]


# Norms of gradients of which each stage of a pipeline has a part: those of all stages together.


_NORMS_CHECKED = 100  # norms: a check waits for the device


class StageNorms:
    """What `torch.nn.utils.clip_grad_norm_` and `get_total_norm` take on this stage."""

    def __init__(self, model: nn.Module, links: StageLinks, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._links = links
        self._optimizers = optimizers
        self._taken = 0

    def over_all_stages(self) -> AbstractContextManager[None]:
        """A context in which they are those over all stages."""
        return combined_norms(self._combine)

    def _combine(self, norm: Tensor, gradients: Sequence[Tensor], power: float) -> Tensor:
        """A collective of the stages. Gradients that are not the model's own stay this rank's affair."""
        taken = {id(gradient) for gradient in gradients}
        if not taken <= _gradients_of(self._model.parameters()):
            return norm
        if self._taken < _NORMS_CHECKED:
            self._taken += 1
            self._check_belong_together(taken)
        divided: Any = norm  # a DTensor where the stage is sharded
        mesh = getattr(divided, "device_mesh", None)
        whole = (norm if mesh is None else divided.full_tensor()).detach().to(self._links.device).clone()
        if power == torch.inf:
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._links.group)
        else:
            whole.pow_(power)
            dist.all_reduce(whole, group=self._links.group)
            whole.pow_(1 / power)
        return whole if mesh is None else replicate(whole, mesh)

    def _check_belong_together(self, taken: set[int]) -> None:
        """RequestError, on every stage, where the gradients of several stages meet in one norm, and are neither all of
        a stage nor those of a parameter group: a loop over the parameters has others on each stage."""
        known = any(taken == whole for whole in self._wholes())
        found = torch.tensor([bool(taken), bool(taken) and not known], dtype=torch.float64).to(self._links.device)
        dist.all_reduce(found, group=self._links.group)
        stages, unknown = found.tolist()
        if stages > 1 and unknown:
            raise RequestError(
                "a norm was taken of some gradients of each stage of the pipeline, and nothing says which of them"
                " belong together: a loop over model.parameters() comes to other parameters on each stage",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), or one norm per parameter group of the"
                " optimizer",
            )

    def _wholes(self) -> Iterator[set[int]]:
        yield _gradients_of(self._model.parameters())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield _gradients_of(group["params"])


def _gradients_of(parameters: Any) -> set[int]:
    return {id(parameter.grad) for parameter in parameters if parameter.grad is not None}
