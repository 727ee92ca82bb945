"""What acts once per pass over a global batch, at its last micro batch: optimizers, schedulers, scalers, averages.

The loop keeps its own calls, such as `optimizer.step()`. In the micro batches before the last one they do nothing. The
objects stay torch's; only the named methods of these instances are replaced, as torch's learning rate schedulers
replace `optimizer.step`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.marks import Mark, mark_all, spread
from hpcddp.training.remarks import print_warning
from hpcddp.training.torch_compat import note_steps

# Steps that were asked for in a micro batch before the last, and have to be asked for in the last one too.


class _Call(NamedTuple):
    text: str
    is_optimizer: bool


class AskedSteps:
    """What was asked to act in this global batch, by the objects' ids: too early, and at a last micro batch."""

    def __init__(self) -> None:
        self._early: dict[int, _Call] = {}
        self._acted: set[int] = set()

    def start(self) -> None:
        """A global batch begins."""
        self._early.clear()
        self._acted.clear()

    def note_early(self, thing: object, method: str, *, is_optimizer: bool = False) -> None:
        """The thing's method was called before the last micro batch, where it does nothing."""
        self._early[id(thing)] = _Call(f"{type(thing).__name__}.{method}()", is_optimizer)

    def note_acted(self, thing: object) -> None:
        """It was called in the last one, or left out on purpose."""
        self._acted.add(id(thing))

    def check(self, *, optimizers_only: bool) -> None:
        """The global batch is over. RequestError for a call that was made, and never where it does something."""
        for thing, call in self._early.items():
            if thing not in self._acted and (call.is_optimizer or not optimizers_only):
                raise RequestError(
                    f"{call.text} was called in some micro batches of a global batch and not in the last one: only"
                    " there it does something",
                    "without a condition it acts once per global batch; every third time: if rt.steps % 3 == 0: …, in"
                    " place of a count of the loader's batches",
                )


# Whether gradients are scaled: a gradient scaler has to be given to the backward pass and to the step alike.


class ScaledGradients:
    """The gradient scalers of a run, and what they have scaled."""

    def __init__(self) -> None:
        self.scalers: list[GradScaler] = []
        self._last: weakref.ref[Tensor] | None = None  # what `scaler.scale` returned last
        self._updated_at: dict[int, int] = {}  # by scaler: backward passes before its last update
        self._used_at: dict[int, dict[int, int]] = {}  # by scaler and optimizer: the same, since its last update

    def scale(self, original: Callable[..., Any], outputs: Any) -> Any:
        """In place of `scaler.scale`."""
        result = original(outputs)
        if isinstance(result, Tensor) and result is not outputs:  # a scaler that is off returns what it was given
            self._last = weakref.ref(result)
        return result

    def check_prepared(self, scaler: GradScaler | None, loss: Tensor | None = None) -> None:
        """RequestError for a scaler that the run does not have, and for a loss that `scaler.scale` returned."""
        if scaler is not None and scaler.is_enabled() and scaler not in self.scalers:
            raise RequestError(
                "the gradient scaler was not prepared",
                "model, optimizer, scaler, loader = rt.prepare(model, optimizer, scaler, loader)",
            )

        if loss is not None and self._last is not None and self._last() is loss:
            raise RequestError(
                "rt.backward was given a loss that scaler.scale(loss) has scaled: it would be recorded so",
                "rt.backward(loss, scaler=scaler)",
            )

    def note_update(self, scaler: GradScaler, backwards: int) -> None:
        """After so many backward passes it has made its next scale, and forgotten what it has unscaled."""
        self._updated_at[id(scaler)] = backwards
        self._used_at.pop(id(scaler), None)

    def note_use(self, scaler: GradScaler, optimizer: Optimizer, backwards: int) -> None:
        """After so many backward passes it has unscaled the optimizer's gradients, or stepped it."""
        self._used_at.setdefault(id(scaler), {})[id(optimizer)] = backwards

    def check_updates(self, scaler: GradScaler, optimizer: Optimizer, scaled_at: int) -> None:
        """RequestError if the gradients, which a backward pass has scaled, are to be unscaled with another scale, or
        would not be unscaled, since the scaler takes them for those that it has unscaled before."""
        kind = type(optimizer).__name__
        if scaled_at <= self._updated_at.get(id(scaler), -1):
            raise RequestError(
                f"scaler.update() came between rt.backward(loss, scaler=scaler) and the step of this {kind}: its"
                " gradients would be divided by another scale than they were multiplied with",
                "rt.step(oa, ob, scaler=scaler) for both optimizers, or scaler.step(oa); scaler.step(ob);"
                " scaler.update()",
            )
        if self._used_at.get(id(scaler), {}).get(id(optimizer), scaled_at) < scaled_at:
            raise RequestError(
                f"the gradient scaler has unscaled the gradients of this {kind} before the last rt.backward(loss,"
                " scaler=scaler), and there was no scaler.update() since",
                "scaler.update() in each step, also after rt.skip_step()",
            )


# What optimizers see of the training loop.


class LoopView(Protocol):
    """Where the loop is in its global batch."""

    @property
    def inside(self) -> bool:
        """Whether the loop has taken a batch and its step has not ended."""

    @property
    def is_in_epoch(self) -> bool:
        """Whether the loop is in the body of `rt.epochs`, or in a global batch."""

    @property
    def acts(self) -> bool:
        """Whether this is the last micro batch of a pass, or no micro batch at all."""

    @property
    def is_left(self) -> bool:
        """Whether the loop over the batches was left, and no backward pass came since."""

    @property
    def accumulates(self) -> bool:
        """Whether the pass over this global batch has several micro batches, and the loop is in one of them."""

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass was made in this micro batch."""

    @property
    def backwards(self) -> int:
        """Backward passes since the start of the attempt."""

    @property
    def backwards_before_pass(self) -> int:
        """The same when this pass over the global batch began."""

    def collect(self) -> None:
        """Make the gradient of the global batch, if that was not done yet."""


# What became of one optimizer's gradients since its last step: whether it may step on them.


class OwnGradients:
    """The gradients of one optimizer's parameters."""

    def __init__(self, optimizer: Optimizer, loop: LoopView) -> None:
        self._optimizer = optimizer
        self._loop = loop
        self._chosen: list[nn.Parameter] = []  # the parameters that are marked
        self._held = -1  # parameters, when they were chosen
        self._stepped_at = -1  # backward passes before its last step
        self._stepped_with: list[Mark] = []  # some that it stepped on, until they are cleared
        self.stepped_with_some = False  # whether a gradient reached the last step
        self._cleared_at = -1  # backward passes before they were cleared between backward and step
        self._left: list[Mark] = []  # what this left
        self._before: list[Mark] | None = None  # before a scaled backward pass, where it may reach others only
        self.scaled_at = -1  # backward passes before and with the last scaled one that reached them
        self._scaled_with: list[Mark] = []  # some that this brought
        self.unscaled_at = -1  # backward passes before a scaler unscaled them
        self._at_start: list[Mark] | None = None  # some before this micro batch, where it may reach others only
        self._beside: list[Mark] = []  # some that `loss.backward()` brought, until they are cleared
        self._kept_at = -1  # backward passes before a `zero_grad()` of this micro batch that left them as they were

    @property
    def were_stepped_on(self) -> bool:
        """Whether no backward pass came since the last step."""
        return self._stepped_at == self._loop.backwards

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def mark(self) -> list[Mark]:
        """Some of those that there are, spread over the parameters."""
        held = sum(len(group["params"]) for group in self._optimizer.param_groups)
        marks = mark_all(self._chosen) if held == self._held else []
        if not marks:
            self._chosen, self._held = spread([p for p in self.parameters if p.grad is not None]), held
            marks = mark_all(self._chosen)
        return marks

    def look(self) -> None:
        """Note that they were cleared or set to zero by other means, such as `model.zero_grad()`."""
        self._stepped_with = [mark for mark in self._stepped_with if mark.holds()]
        if self._scaled_with and self._scaled_with[0].parameter.grad is None and not self._loop.accumulates:
            self.scaled_at, self._scaled_with = -1, []

    def expect_backward(self, *, alone: bool) -> None:
        """A backward pass comes. `alone`: the run has no other optimizer, so that each of them reaches these.

        RequestError if it is the second in one of several micro batches, and they were to be cleared before it.
        """
        self.look()
        self._beside = [mark for mark in self._beside if mark.is_there()]  # reads them, if there are any
        if not self._loop.accumulates:
            return
        if not self._loop.has_backward:
            self._at_start = None if alone else [Mark(parameter) for parameter in spread(list(self.parameters))]
        elif self._kept_at == self._loop.backwards:
            raise RequestError(
                "optimizer.zero_grad() came between two rt.backward(loss) of one micro batch, and a global batch has"
                " several here: the gradients of the first would stay in the sum, with those of the micro batches"
                " before",
                "for step in loader.steps(): one pass `for x in step: …` for each optimizer; or"
                " hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch",
            )

    def note_kept(self) -> None:
        """The optimizer's `zero_grad()` has left them as they were."""
        before = self._at_start
        if self._loop.has_backward and (before is None or not all(mark.holds() for mark in before)):
            self._kept_at = self._loop.backwards

    def note_backward(self) -> None:
        """A backward pass has changed them: that did not clear those of the step before."""
        self._stepped_with = mark_all(mark.parameter for mark in self._stepped_with)

    def note_beside(self, parameters: Sequence[nn.Parameter]) -> None:
        """A backward pass that was not `rt.backward` has brought their gradients."""
        self._beside += [Mark(parameter) for parameter in spread(parameters) if type(parameter.grad) is Tensor]

    def check_beside(self) -> None:
        """RequestError if the optimizer is to step on gradients that `loss.backward()` brought beside `rt.backward`."""
        if self._loop.inside and self._loop.backwards > self._used and any(mark.is_there() for mark in self._beside):
            raise RequestError(
                f"the {type(self._optimizer).__name__} is to step on gradients that loss.backward() brought: they are"
                " not weighted and averaged as those of rt.backward(loss)",
                "rt.backward(loss) in place of each loss.backward(); optimizer.zero_grad() after one that only looks at"
                " gradients",
            )

    def expect_scaled(self) -> None:
        """A scaled backward pass comes that may reach other optimizers only: these gradients are marked before it."""
        self._before = [Mark(parameter) for parameter in self.parameters]

    def note_scaled(self) -> None:
        """The last backward pass was a scaled one."""
        before, self._before = self._before, None
        if before is None or any(map(_may_be_other, before)):
            self.scaled_at, self._scaled_with = self._loop.backwards, self.mark()

    def note_step(self) -> None:
        """The optimizer has stepped on them."""
        self._stepped_at = self._loop.backwards
        self._stepped_with = self.mark()
        self.stepped_with_some = bool(self._stepped_with)

    def are_partial(self) -> bool:
        """Whether they hold what earlier micro batches of this pass brought, so that clearing them would drop that."""
        began = self._loop.backwards_before_pass
        return self._loop.accumulates and self._loop.backwards > began and self._stepped_at <= began

    def note_cleared(self) -> None:
        """The optimizer's `zero_grad()` has cleared them."""
        self._stepped_with, self._scaled_with, self._beside = [], [], []
        self.scaled_at = -1
        if self._loop.inside and self._loop.backwards > self._used:  # between backward and step
            self._cleared_at, self._left = self._loop.backwards, [Mark(p) for p in self.parameters]

    @property
    def _used(self) -> int:
        """The newest backward pass that the next step in this pass over the global batch is too late for."""
        return max(self._stepped_at, self._loop.backwards_before_pass)

    def check_step(self) -> None:
        """RequestError if the optimizer cannot step on them."""
        if not self._loop.inside:
            return
        if self._loop.backwards == self._used:
            raise RequestError(
                "optimizer.step() came without a new rt.backward(loss) since its last one",
                "rt.backward(loss) in place of loss.backward(), then optimizer.step() once",
            )
        if self._stepped_with:
            raise RequestError(
                "optimizer.step() came with the gradients of the step before still in the sum",
                "optimizer.zero_grad() in each step",
            )
        self.check_cleared()

    def are_scaled(self, scale_read_at: int) -> bool:
        """Whether a backward pass has scaled them, and nothing has unscaled them since.

        A script that unscales them itself reads the scale, after so many backward passes, and changes them.
        """
        if self.scaled_at <= max(self._used, self.unscaled_at):
            return False
        unchanged = not self._scaled_with or self._scaled_with[0].holds()
        return unchanged or scale_read_at < self.scaled_at

    def check_scaled(self) -> None:
        """RequestError if a scaler is to unscale them, or step on them, and no backward pass of this pass over the
        global batch has scaled them."""
        if self._loop.inside and self.scaled_at <= self._loop.backwards_before_pass:
            raise RequestError(
                f"a gradient scaler was given to the step of a {type(self._optimizer).__name__}, but there was no"
                " rt.backward(loss, scaler=scaler) before it",
                "rt.backward(loss, scaler=scaler)",
            )

    def check_cleared(self) -> None:
        """RequestError if they were cleared after the last backward pass, and nothing else was put there."""
        if self._loop.inside and self._cleared_at == self._loop.backwards and all(mark.holds() for mark in self._left):
            raise RequestError(
                "optimizer.step() came after the gradients of rt.backward(loss) were cleared",
                "optimizer.zero_grad() before rt.backward(loss), or after optimizer.step()",
            )


def _may_be_other(mark: Mark) -> bool:
    """Whether the gradient may be another one by now. That of a sharded model does not say."""
    gradient = mark.parameter.grad
    return not mark.holds() or (gradient is not None and type(gradient) is not Tensor)


# Which parameters a run trains: those that its models had when they were prepared, for only these the ranks share.


class KnownParameters:
    """The parameters of the prepared models.

    `fixed`: whether only those that require a gradient now can be trained, as where DDP or an exact run sums gradients.
    """

    def __init__(self, models: Sequence[nn.Module], *, fixed: bool) -> None:
        named = [(f"{name} of {type(model).__name__}", p) for model in models for name, p in model.named_parameters()]
        self._all = {id(parameter) for _, parameter in named}
        self._frozen = {id(p): name for name, p in named if fixed and not p.requires_grad}

    def find_frozen(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Those of the optimizer that cannot be trained. RequestError if it has one that is not known."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in self._all for parameter in held)
        if foreign:
            raise RequestError(
                f"{foreign} of the parameters of a {type(optimizer).__name__} were in no prepared model at rt.prepare",
                "give the model all its layers, and the optimizer all its groups, before rt.prepare(model, optimizer,"
                " loader)",
            )
        return [parameter for parameter in held if id(parameter) in self._frozen]

    def check_frozen(self, frozen: Sequence[nn.Parameter]) -> None:
        """RequestError if one of them requires a gradient by now."""
        thawed = next((parameter for parameter in frozen if parameter.requires_grad), None)
        if thawed is not None:
            raise RequestError(
                f"{self._frozen[id(thawed)]} requires a gradient, and did not at rt.prepare: the ranks' gradients would"
                " not be averaged",
                "model.requires_grad_(True) before rt.prepare; for a layer that is trained later, a group of the"
                " optimizer with lr=0.0 until then",
            )


# Optimizers that make another one step, such as those for sharpness-aware minimization (SAM).


def find_outer(inner: Optimizer, optimizers: Iterable[Optimizer]) -> tuple[str, str] | None:
    """The class of the one among `optimizers` that has `inner` as an attribute, and the attribute's name."""
    return next(
        ((type(outer).__name__, name) for outer in optimizers for name, thing in vars(outer).items() if thing is inner),
        None,
    )


def keep_groups_shared(one: Optimizer, other: Optimizer) -> None:
    """They have one list of parameter groups, also when one has loaded its state, which makes a list of its own."""
    one.register_load_state_dict_post_hook(functools.partial(_follow, other))
    other.register_load_state_dict_post_hook(functools.partial(_follow, one))


def _follow(follower: Optimizer, loaded: Optimizer) -> None:
    follower.param_groups = loaded.param_groups


# What the optimizers of a run have done in the global batch that the loop is at, and what each of them may do.


_EITHER = "if norm.isfinite(): optimizer.step(); else: rt.skip_step(), or rt.skip_step(optimizer) for one of several"


class OptimizerSteps:
    """All optimizers of a run, and which of them have stepped in this global batch."""

    def __init__(self) -> None:
        self.optimizers: list[SeenOptimizer] = []
        self.scaled = ScaledGradients()
        self.known: KnownParameters | None = None  # as soon as all objects are taken
        self.scaling = False  # a scaler steps an optimizer, now
        self.asked = False  # for a step in this micro batch
        self.asked_last = False  # whether the script asked if it is the last
        self.acted = False  # some optimizer in this global batch
        self.acts = False  # an optimizer, now
        self.reached = False  # some gradient an optimizer that acted in this global batch
        self.calls = AskedSteps()
        self.stepped: set[int] = set()  # optimizers that have stepped in this global batch, by id
        self.skipped: set[int] = set()  # those whose step was left out on purpose
        self.scale_read_at = -1  # backward passes before the script asked a scaler for its scale
        self.keeps_memory = False  # whether DDP, or an exact sum, has memory of its own for gradients
        self._places: list[Mark] = []  # gradients that are to stay in their memory until the step

    def batch_starts(self) -> None:
        """The loop gets the first micro batch of a global batch."""
        self.acted = self.reached = False
        self.calls.start()
        self.stepped.clear()
        self.skipped.clear()

    def note_places(self, *, looks: bool) -> None:
        """The gradients are where the ranks have put them. `looks`: whether `check_places` is to look."""
        looks &= self.keeps_memory
        self._places = [mark for seen in self.optimizers for mark in seen.gradients.mark()] if looks else []

    def check_places(self) -> None:
        """RequestError if the script has given a gradient other memory, which DDP and the exact sums keep their own
        of."""
        if any(mark.was_moved() for mark in self._places):
            raise RequestError(
                "p.grad.data = … came between rt.backward(loss) and optimizer.step(): the ranks go on with the memory"
                " that the gradient had before",
                "p.grad.clamp_(-1, 1), or another change in place; or p.grad = p.grad.clamp(-1, 1)",
            )

    def find(self, optimizer: Optimizer) -> SeenOptimizer | None:
        return next((seen for seen in self.optimizers if seen.optimizer is optimizer), None)


class SeenOptimizer:
    """One optimizer: its `step` and `zero_grad`."""

    def __init__(self, optimizer: Optimizer, steps: OptimizerSteps, loop: LoopView) -> None:
        self.optimizer = optimizer
        self.gradients = OwnGradients(optimizer, loop)
        self.clear: Callable[[], None] = optimizer.zero_grad
        self._steps = steps
        self._loop = loop
        self._held = -1  # parameters, when they were looked at last
        self._frozen: list[nn.Parameter] = []  # of these, those that cannot be trained

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._steps.asked = True
        if self._loop.inside and any(map(callable, (*args, *kwargs.values()))):
            raise RequestError(
                "optimizer.step(closure) is not supported: it evaluates one batch, perhaps several times, and a step"
                " here is that of the global batch",
                "rt.backward(loss); optimizer.first_step(zero_grad=True); rt.backward(loss_fn(model(x), y));"
                " optimizer.second_step(zero_grad=True)"
                if hasattr(self.optimizer, "second_step")
                else "rt.backward(loss); optimizer.step(), with an optimizer that needs no closure",
            )
        if self._loop.accumulates and not self._steps.acts:
            self._check_outer()
        if not self._loop.acts:
            self.note_early()
            return None
        self._check_parameters()
        self.gradients.check_beside()
        self._steps.check_places()
        self._loop.collect()
        self._check_not_skipped()
        self.gradients.check_step()
        if self._loop.inside and not self._steps.scaling and self.gradients.are_scaled(self._steps.scale_read_at):
            raise RequestError(
                "optimizer.step() came with gradients which rt.backward(loss, scaler=scaler) has scaled",
                "rt.step(optimizer, scaler=scaler), or scaler.step(optimizer); scaler.update()",
            )
        self._steps.acts = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._steps.acts = False
        self.note_step()
        return result

    def note_early(self) -> None:
        """Its step was asked for before the last micro batch."""
        self._steps.calls.note_early(self.optimizer, "step", is_optimizer=True)

    def _check_outer(self) -> None:
        """RequestError if this belongs to another optimizer, such as one for SAM, which acts between its steps."""
        outer = find_outer(self.optimizer, [seen.optimizer for seen in self._steps.optimizers])
        if outer is not None:
            raise RequestError(
                f"the {outer[0]} has this {type(self.optimizer).__name__} step, and a global batch has several micro"
                f" batches here: what the {outer[0]} does before would be done in each of them",
                "hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch",
            )

    def _check_parameters(self) -> None:
        """RequestError for parameters that came, or were unfrozen, after `rt.prepare`."""
        known, held = self._steps.known, sum(len(group["params"]) for group in self.optimizer.param_groups)
        if known is not None and held != self._held:
            self._held, self._frozen = held, known.find_frozen(self.optimizer)
        if known is not None and self._frozen:
            known.check_frozen(self._frozen)

    def check_scaled(self, scaler: GradScaler) -> None:
        """RequestError if it cannot step with this scaler."""
        self._check_not_skipped()
        self.gradients.check_beside()
        self.gradients.check_cleared()
        if scaler.is_enabled():
            self.gradients.check_scaled()
            if self._loop.inside and not self.gradients.were_stepped_on:
                self._steps.scaled.check_updates(scaler, self.optimizer, self.gradients.scaled_at)

    def check_not_stepped(self) -> None:
        """RequestError if it has stepped in this global batch."""
        if id(self) in self._steps.stepped:
            raise RequestError(f"rt.skip_step() came after the {type(self.optimizer).__name__} had stepped", _EITHER)

    def _check_not_skipped(self) -> None:
        if id(self) in self._steps.skipped:
            raise RequestError("optimizer.step() came after rt.skip_step() in one global batch", _EITHER)

    def skip(self) -> None:
        """Leave this step out: the gradients are dropped, and the batch counts."""
        self._note_done()
        self._steps.skipped.add(id(self))
        note_steps(self.optimizer)  # a scheduler may step, as after a step that a gradient scaler leaves out
        self.clear()
        self.gradients.note_cleared()

    def note_step(self) -> None:
        """It has stepped."""
        self._note_done()
        self._steps.stepped.add(id(self))

    def _note_done(self) -> None:
        self.gradients.note_step()
        self._steps.calls.note_acted(self.optimizer)
        self._steps.acted = True
        self._steps.reached |= self.gradients.stepped_with_some

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acts unless that would drop what earlier micro batches of this pass brought."""
        if self.gradients.are_partial():
            if not any(find_outer(seen.optimizer, [self.optimizer]) for seen in self._steps.optimizers):
                self.gradients.note_kept()  # of the others the step of the inner one says what is wrong
            return
        original(*args, **kwargs)
        self.gradients.note_cleared()


# Another method in place of one of torch's, of one instance only.


def replace(thing: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """The instance's method `name` becomes `method(original, ...)`; it stays a method, which schedulers wrap again.

    Returns what undoes that. Where something has wrapped the method since, it stays, and calls the original alone.
    """
    original, former = getattr(thing, name), vars(thing).get(name)
    is_undone = False

    @functools.wraps(original)
    def replaced(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_undone else method(original, *args, **kwargs)

    bound = MethodType(replaced, thing)
    setattr(thing, name, bound)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if vars(thing).get(name) is not bound:
            return
        if former is None:
            delattr(thing, name)
        else:
            setattr(thing, name, former)

    return undo


def replace_in_class(thing: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """The same by a class of its own with the same name, where all that the instance holds is its state.

    Pickled and copied, it is of its former class: no module has the new one.
    """
    cls = type(thing)
    original = getattr(cls, name)
    is_undone = False

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(original, self)
        return bound(*args, **kwargs) if is_undone else method(bound, *args, **kwargs)

    former = getattr(cls, "_former_class", cls)

    def reduce(self: Any, _protocol: int) -> Any:
        made: Any = object.__reduce_ex__(self, 1)  # later protocols insist on the object's class
        function, arguments, *state = made
        return function, tuple(former if part is type(self) else part for part in arguments), *state

    methods = {name: replaced, "_former_class": former, "__module__": cls.__module__}
    if (former.__reduce_ex__, former.__reduce__) == (object.__reduce_ex__, object.__reduce__):  # no way of its own
        methods["__reduce_ex__"] = reduce
    made_class = type(cls.__name__, (cls,), methods)
    thing.__class__ = made_class

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if type(thing) is made_class:
            thing.__class__ = cls

    return undo


# Objects of the user's own classes with a `step()`: it acts in each micro batch, where an optimizer's does nothing.


def watch_steps(thing: object, loop: LoopView, *, is_first: bool) -> Callable[[], None]:
    """From now on the first `step()` before a last micro batch is a warning on rank 0. Returns what undoes that."""
    has_warned = False
    kind = type(thing).__name__

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        if not (has_warned or loop.acts or loop.is_left):
            has_warned = True
            print_warning(
                f"{kind}.step() is called in each micro batch, and a global batch has several here: only an"
                " Optimizer, an LRScheduler and an AveragedModel wait for the last one\nhint: if"
                f" rt.is_last_micro_batch: … around the step of the {kind}",
                is_first=is_first,
            )
        return original(*args, **kwargs)

    with suppress(TypeError):  # an object with __slots__ cannot get another class
        return replace_in_class(thing, "step", step)
    return lambda: None


# What a gradient scaler does once per global batch, and what it may step.


class SeenScaler:
    """One gradient scaler: its `unscale_`, `step`, `update` and `get_scale`."""

    def __init__(self, scaler: GradScaler, steps: OptimizerSteps, loop: LoopView) -> None:
        self._scaler = scaler
        self._steps = steps
        self._loop = loop

    def unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._loop.acts:
            return None
        seen = self._find_ready(optimizer)
        if seen is not None:
            seen.gradients.unscaled_at = self._loop.backwards
            self._note_use(optimizer)
        return original(optimizer, *args, **kwargs)

    def step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._steps.asked = True
        if not self._loop.acts:
            self._steps.calls.note_early(optimizer, "step", is_optimizer=True)
            return None
        seen = self._find_ready(optimizer)
        self._steps.scaling = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self._steps.scaling = False
        if seen is not None:
            seen.note_step()  # the scaler leaves a step out if a gradient is infinite
            note_steps(optimizer)  # so its scheduler may step before it does, which torch warns of
            self._note_use(optimizer)
        return result

    def update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._loop.acts:
            return None
        result = original(*args, **kwargs)
        self._steps.scaled.note_update(self._scaler, self._loop.backwards)
        return result

    def get_scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._steps.scale_read_at = self._loop.backwards
        return original(*args, **kwargs)

    def _find_ready(self, optimizer: Optimizer) -> SeenOptimizer | None:
        """This optimizer, if it was prepared, with the gradients of the whole global batch. RequestError if it cannot
        step with this scaler."""
        seen = self._steps.find(optimizer)
        if seen is not None:
            seen.check_scaled(self._scaler)
        self._loop.collect()
        return seen

    def _note_use(self, optimizer: Optimizer) -> None:
        self._steps.scaled.note_use(self._scaler, optimizer, self._loop.backwards)


class StepGate(OptimizerSteps):
    """All optimizers, schedulers and scalers of a run, which act at the last micro batch only."""

    def __init__(self, loop: LoopView) -> None:
        super().__init__()
        self.schedulers: list[LRScheduler] = []
        self._loop = loop
        self.is_in_backward = False  # that of `rt.backward`
        self.is_first = True  # whether this rank prints warnings
        self._taken: set[int] = set()
        self._undo: list[Callable[[], None]] = []  # what was done to the objects

    def take(self, thing: Any) -> None:
        """From now on this object acts at the last micro batch only. Objects of other kinds stay alone."""
        if id(thing) in self._taken:
            return
        self._taken.add(id(thing))
        if isinstance(thing, Optimizer):
            for other in self.optimizers:
                if other.optimizer.param_groups is thing.param_groups:
                    keep_groups_shared(thing, other.optimizer)
            seen = SeenOptimizer(thing, self, self._loop)
            self.optimizers.append(seen)
            self._replace(thing, "step", seen.step)
            self._replace(thing, "zero_grad", seen.zero_grad)
        elif isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
            self._replace_in_class(thing, "step", partial(self._if_last, thing, "step"))
        elif isinstance(thing, AveragedModel):
            act = partial(self._if_last, thing, "update_parameters")
            self._replace_in_class(thing, "update_parameters", act)
        elif isinstance(thing, GradScaler):
            self.scaled.scalers.append(thing)
            seen_scaler = SeenScaler(thing, self, self._loop)
            self._replace(thing, "scale", self.scaled.scale)
            self._replace(thing, "unscale_", seen_scaler.unscale)
            self._replace(thing, "step", seen_scaler.step)
            self._replace(thing, "update", seen_scaler.update)
            self._replace(thing, "get_scale", seen_scaler.get_scale)
        elif not isinstance(thing, Module) and callable(getattr(type(thing), "step", None)):
            self._undo.append(watch_steps(thing, self._loop, is_first=self.is_first))

    def has_taken(self, thing: object) -> bool:
        """Whether this object acts at the last micro batch only."""
        return id(thing) in self._taken

    def let_go(self) -> None:
        """The run is over, however it ended: the objects act as they did before."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, thing: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.append(replace(thing, name, method))

    def _replace_in_class(self, thing: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.append(replace_in_class(thing, name, method))

    def backward_starts(self, *, scaled: bool) -> None:
        """A backward pass comes, with a gradient scaler or without."""
        self.is_in_backward = True
        for seen in self.optimizers:
            seen.gradients.expect_backward(alone=len(self.optimizers) == 1)
            if scaled and len(self.optimizers) > 1:
                seen.gradients.expect_scaled()

    def backward_ends(self, *, scaled: bool) -> None:
        """It is over, and counted."""
        self.is_in_backward = False
        for seen in self.optimizers:
            seen.gradients.note_backward()
            if scaled:
                seen.gradients.note_scaled()

    def skip(self, optimizers: Sequence[Optimizer]) -> bool:
        """Leave the step of these optimizers out, or of all. Acts as a step does; returns whether it did."""
        found = [self._need(optimizer) for optimizer in optimizers] or self.optimizers
        self.asked = True
        if not self._loop.acts:
            return False
        for seen in found:
            seen.check_not_stepped()
        self._loop.collect()
        for seen in found:
            seen.skip()
        return True

    def _need(self, optimizer: Optimizer) -> SeenOptimizer:
        seen = self.find(optimizer)
        if seen is None:
            raise RequestError(
                f"rt.skip_step was given a {type(optimizer).__name__} that was not prepared",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader), then rt.skip_step(optimizer)",
            )
        return seen

    def note_early(self, optimizers: Sequence[Optimizer], scheduler: LRScheduler | None) -> None:
        """`rt.step` was called for these before the last micro batch."""
        self.asked = True
        for optimizer in optimizers:
            self.calls.note_early(optimizer, "step", is_optimizer=True)
        if scheduler is not None:
            self.calls.note_early(scheduler, "step")

    def check_calls(self) -> None:
        """The global batch is over. RequestError for a call that was made in other micro batches only.

        A scheduler and an average may follow a step that was left out: on purpose, or by a gradient scaler.
        """
        may_skip = bool(self.skipped) or any(scaler.is_enabled() for scaler in self.scaled.scalers)
        self.calls.check(optimizers_only=may_skip)

    def _if_last(self, thing: object, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self._loop.acts or self._loop.is_left):
            self.calls.note_early(thing, name)
            return None
        self.calls.note_acted(thing)
        return original(*args, **kwargs)


def step_all(
    optimizers: Sequence[Optimizer],
    scheduler: LRScheduler | None,
    clip_norm: float | None,
    scaler: GradScaler | None,
) -> None:
    """All that follows the last backward pass: unscale, clip, step, update, step the scheduler, clear the gradients."""
    if clip_norm is not None:
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        clip_grad_norm_([p for o in optimizers for group in o.param_groups for p in group["params"]], clip_norm)
    for optimizer in optimizers:
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()
    if scheduler is not None:
        scheduler.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
