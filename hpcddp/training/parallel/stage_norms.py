"""Norms of gradients of which each stage of a pipeline has a part: those of all stages together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.parallel.stage_links import StageLinks
from hpcddp.training.parallel.tensor import replicate
from hpcddp.training.torch_compat import combined_norms

_CHECKED_FIRST = 100  # norms: a check waits for the device


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
        if self._taken < _CHECKED_FIRST:
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
