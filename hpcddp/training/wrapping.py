"""How a run takes a model over: on this rank's device, distributed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.batchplan import BatchPlan
from hpcddp.training.all_ranks import AllRanks
from hpcddp.training.arguments import check_kind
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.gate.renormed import find_renormed
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.kinds import check_model
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.parallel.placing import check_places, list_accelerators
from hpcddp.training.parallel.sameness import SameWeights
from hpcddp.training.parallel.sharded import Blocks, Wanted
from hpcddp.training.parallel.strategy import check_uncompiled, check_wanted
from hpcddp.training.parallel.tensor import TensorPlan
from hpcddp.training.remarks import print_warning, warn_of_hooks
from hpcddp.training.report import Report
from hpcddp.training.setup import RunSetup


class Wrapping(AllRanks):
    """The part of a `Runtime` that holds the models as the loop uses them."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        loop: TrainingLoop,
        report: Report,
        list_untrained: Callable[[], list[nn.Module]],
    ) -> None:
        super().__init__(setup, loop, report)
        self._options = setup.options
        self._split = setup.split
        self._gradients = gradients
        self._same = SameWeights(loop.models, setup.layout, setup.group.device, list_untrained)
        self._models: dict[int, nn.Module] = {}  # as the loop uses them, by id
        self._plan: BatchPlan | None = None

    def wrap(
        self,
        model: nn.Module,
        *,
        blocks: Blocks | None = None,
        tensor_plan: TensorPlan | None = None,
        stages: Sequence[str] | None = None,
        schedule: str | None = None,
        **options: Any,
    ) -> nn.Module:
        """The model on this rank's device, distributed over the ranks if there are several. `prepare` calls it. A model
        whose parts are on several of `rt.devices` stays there.

        `hpcddp.runtime(parallel=…)` says how. "ddp" wraps it in torch's DistributedDataParallel; the others shard every
        parameter in place, so make the optimizer afterwards; each module of a class in `blocks` is gathered on its own.
        Where a mesh has tensor ranks, `tensor_plan` says which layers they divide, by the names of modules: "colwise",
        "rowwise" or a style of `torch.distributed.tensor.parallel`; None: the model's attribute `tensor_plan`.
        Where it has pipeline ranks, `stages` names the modules at which the stages after the first begin (None: the
        model's attribute `pipeline_stages`), and `schedule` is "1f1b" (None) or "gpipe".
        `options` are those of torch's DDP or fully_shard. Buffers are not broadcast at each forward pass: they are
        averaged before an evaluation and a checkpoint.
        """
        check_model(model, list(self._models.values()))
        self._loop.first.renormed |= find_renormed(model, self.layout.data_size)
        hooks = warn_of_hooks(model, self._plan, self.layout.data_size)
        print_warning(hooks, is_first=self.group.is_first)
        wanted = Wanted(blocks, tensor_plan, options, stages, schedule)
        check_wanted(self._split, wanted, is_second=bool(self._models))
        check_uncompiled(model, self._split)
        exact = self._options.exactness is not None
        check_places(list_accelerators(model), self.devices, self._split, exact=exact)
        if self._split.is_whole or (self._split.pipeline > 1 and not self._split.is_sharded):
            self._loop.models.append(model)
        wrapped = self._gradients.wrap(model, wanted)
        self._loop.calls.watch(wrapped)
        self._loop.gate.keeps_memory |= exact or isinstance(wrapped, DistributedDataParallel)
        self._models[id(wrapped)] = wrapped
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model inside of what `prepare` made of it."""
        check_kind(model, nn.Module, "rt.unwrap({})", "model", "model")
        return unwrap(model)

    def _check_first_steps(self) -> None:
        """After each step. A collective in the first ones of an attempt."""
        self._same.check_first(self._loop.steps)
        self._loop.first.compare_shares(self.layout, self.device)
