"""Optimizers, schedulers and averages that act in a run and were not prepared: their state is in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.nested import find_outer
from hpcddp.training.gate.step_gate import StepGate
from hpcddp.training.torch_compat import has_scheduler


@contextmanager
def guarding(gate: StepGate, loop: LoopView, models: Sequence[nn.Module]) -> Iterator[None]:
    """Meanwhile RequestError if an optimizer or an AveragedModel that was not taken steps or averages parameters of
    these models in the loop: it would do that in each micro batch."""
    known = {id(parameter) for model in models for parameter in model.parameters()}

    def look(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if gate.acts or not loop.inside:  # one that steps another inside, such as ZeRO's
            return
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            outer = find_outer(optimizer, [seen.optimizer for seen in gate.optimizers])
            raise RequestError(
                f"this {type(optimizer).__name__} steps a prepared model, and was not prepared itself",
                f"model, optimizer, inner, loader = rt.prepare(model, optimizer, optimizer.{outer[1]}, loader)"
                if outer is not None
                else "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers",
            )

    update = AveragedModel.update_parameters

    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        if loop.is_in_epoch and not gate.has_taken(average) and any(id(p) in known for p in model.parameters()):
            raise RequestError(
                "this AveragedModel averages a prepared model, and was not prepared itself: it would do so in each"
                " micro batch, and no checkpoint has it",
                "ema = AveragedModel(model); model, optimizer, ema, loader = rt.prepare(model, optimizer, ema, loader)",
            )
        update(average, model)

    handle = register_optimizer_step_pre_hook(look)
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign, assignment]  # torch has no hook for it
    try:
        yield
    finally:
        AveragedModel.update_parameters = update  # type: ignore[method-assign]  # as it was
        handle.remove()


def check_schedulers(gate: StepGate) -> None:
    """RequestError if an optimizer's scheduler was not taken: a resumed run would begin its schedule anew."""
    for seen in gate.optimizers:
        taken = any(scheduler.optimizer is seen.optimizer for scheduler in gate.schedulers)
        if has_scheduler(seen.optimizer) and not taken:
            raise RequestError(
                f"the {type(seen.optimizer).__name__} has a scheduler that was not prepared",
                "model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)",
            )


def check_optimizers_of(models: Sequence[nn.Module], gate: StepGate) -> None:
    """RequestError for an optimizer that would step parameters of no model of the run."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for seen in gate.optimizers:
        groups: list[dict[str, Any]] = seen.optimizer.param_groups
        foreign = sum(id(p) not in known for group in groups for p in group["params"])
        if foreign:
            raise RequestError(
                f"{foreign} of the parameters of a {type(seen.optimizer).__name__} belong to no prepared model",
                "give rt.prepare every model that is trained, and make the optimizer from their parameters",
            )
