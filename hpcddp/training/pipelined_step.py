"""A step whose micro batches go through the stages of a pipeline, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hpcddp.errors import RequestError
from hpcddp.training.data.loader import Part, Step
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.gradient.backward import run_backward
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.parallel.staged import Passed, StagedModel, plan_turns
from hpcddp.training.parallel.steps_together import TOGETHER, steps_together


class PipelinedSteps:
    """Runs the micro batches of a step through this rank's stage."""

    def __init__(self, staged: StagedModel, loop: TrainingLoop, seed: int, data_rank: int) -> None:
        self._staged = staged
        self._loop = loop
        self._key = seed, data_rank

    def run(self, step: Step, loss_of: Callable[[Any], Tensor], *, summed: bool, scaler: GradScaler | None) -> Tensor:
        """One pass over the step; the losses of its micro batches that count, detached, on every stage."""
        if scaler is not None:
            raise refuse_scaler()
        loop, staged = self._loop, self._staged
        with step.at_once() as parts:
            again = (step.passes - 1,) if step.passes > 1 else ()
            # a sharded stage has to make every pass, since its data ranks wait for each other in it
            made = [part for part in parts if part.weight.counted > 0 or staged.is_sharded]
            loop.gate.backward_starts(scaled=False)
            with staged.averaging():
                losses = self._make(made, loss_of, again, summed=summed)
            loop.backwards += 1
            loop.gate.backward_ends(scaled=False)
            counted = [nth for nth, part in enumerate(made) if part.weight.counted > 0]
            for nth in counted:
                weight = made[nth].weight
                loop.record.add_loss(losses[nth], weight.each if summed else weight.mean, 0)
        return losses[counted]

    def _make(
        self, parts: list[Part], loss_of: Callable[[Any], Tensor], again: tuple[int, ...], *, summed: bool
    ) -> Tensor:
        """All forward and backward passes, in the order of the schedule; returns the losses."""
        staged, links = self._staged, self._staged.links
        under_way: dict[int, Passed] = {}
        losses: dict[int, Tensor] = {}
        for is_forward, nth in plan_turns(staged.schedule, links.stage, links.stages, len(parts)):
            part = parts[nth]
            if is_forward:
                seed_generators("step", *self._draws(part, again))
                batch = part.load()
                reseed = partial(seed_generators, "stage", links.stage, *self._draws(part, again))
                under_way[nth] = staged.forward(partial(loss_of, batch), reseed)
                continue
            passed = under_way.pop(nth)
            staged.exchange(nth == len(parts) - 1)
            with staged.going_back(passed):
                if links.is_last:
                    run_backward(passed.result, part.micro, part.weight, staged.whole, summed=summed)
                    losses[nth] = passed.result.detach().double()
                else:
                    staged.backward(passed)
            staged.send_back(passed)
        links.settle()
        own = [torch.stack([losses[nth].reshape(()) for nth in range(len(parts))])] if losses else []
        room = [torch.empty(len(parts), dtype=torch.float64, device="meta")]
        return links.share(own if links.is_last else room)[0] if parts else torch.zeros(0, dtype=torch.float64)

    def _draws(self, part: Part, again: tuple[int, ...]) -> tuple[int, ...]:
        """What random numbers depend on: the same on all stages until the model begins."""
        seed, data_rank = self._key
        return seed, self._loop.steps, data_rank, part.micro.nth, *again


def check_staged(objects: Mapping[str, Any]) -> None:
    """RequestError for tracked objects that do not go with stages of which a rank has one."""
    for name, thing in objects.items():
        if isinstance(thing, GradScaler):
            raise refuse_scaler()
        if isinstance(thing, AveragedModel):
            raise RequestError(
                f"{name} averages a whole model, and each rank has a stage of it only",
                'hpcddp.runtime(parallel="fsdp"), or leave the average out',
            )
        if isinstance(thing, Optimizer) and any(steps_together(thing, method) for method in ("step", "first_step")):
            raise RequestError(
                f"{name}, of class {type(thing).__name__}, {TOGETHER}, and each rank has those of a stage",
                "torch.optim.AdamW or another one that steps each parameter by itself, or"
                ' hpcddp.runtime(parallel="ddp")',
            )


def refuse_scaler() -> RequestError:
    """Each stage would judge its own gradients only."""
    return RequestError(
        "a gradient scaler does not go with a pipeline: each stage would look at its own gradients only",
        "torch.autocast with bfloat16, which needs no scaler",
    )
