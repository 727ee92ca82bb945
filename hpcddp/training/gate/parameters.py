"""Which parameters a run trains: those that its models had when they were prepared, for only these the ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError


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
