"""Which parameters an optimizer steps on each rank, where the model's split asks for another step than its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from hpcddp.parallelism import Split
from hpcddp.training.checkpoint.owned_states import OwnedStates
from hpcddp.training.gate.replaced import replace
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.whole_steps import WholeSteps
from hpcddp.training.parallel.zero import OwnSteps


def share_out_steps(
    optimizers: Mapping[str, Optimizer],
    split: Split,
    layout: Layout,
    device: torch.device,
    until_end: ExitStack,
    *,
    exact: bool,
) -> OwnedStates:
    """Under ZeRO-1 each data rank steps its own parameters; in exact mode shards step whole. Undone by `until_end`.

    Call it before the gate takes the optimizers, which lets a step through once per global batch.
    """
    steps: dict[str, OwnSteps] = {}
    if split.kind == "zero1" and layout.data_size > 1:
        steps = {name: OwnSteps(thing, layout, device) for name, thing in optimizers.items()}
    for name, thing in optimizers.items():
        if name in steps:
            until_end.callback(replace(thing, "step", steps[name].step))
        elif split.is_sharded and layout.data_size > 1 and exact:
            until_end.callback(replace(thing, "step", WholeSteps(thing).step))
    return OwnedStates(steps)
