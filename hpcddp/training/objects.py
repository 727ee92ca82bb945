"""The models and the training data of a run, as `rt.prepare` takes them over."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.data.loader import SecondLoader, TrainingLoader
from hpcddp.training.gradient.buffers import average_buffers
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.calls import ForwardCalls
from hpcddp.training.parallel.sameness import SameWeights
from hpcddp.training.parallel.sharded import WrapOptions
from hpcddp.training.parallel.strategy import check_places, list_accelerators
from hpcddp.training.torch_compat import release_wrapper


class TrainingData:
    """The training loaders, and how the global batch is dealt to the ranks."""

    def __init__(self) -> None:
        self.plan: BatchPlan | None = None
        self.first: TrainingLoader | None = None
        self.seconds: list[SecondLoader] = []
        self.is_several = False  # whether `rt.micro_batches` opens the loaders' batches

    @property
    def loaders(self) -> list[TrainingLoader]:
        """All of them, the first one first."""
        return [loader for loader in (self.first, *self.seconds) if loader is not None]

    @property
    def loader(self) -> TrainingLoader:
        """The first one. RequestError if there is none yet."""
        if self.first is None:
            raise RequestError(
                "this runtime has no training loader yet",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader)",
            )
        return self.first

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.first.sampler.epoch if self.first is not None else 0

    @property
    def may_end_with_second(self) -> bool:
        """Whether a second loader has no batch left: a zip of the two ends then, and the last step was the epoch's last
        one. If it does not, another step follows."""
        return any(second.is_used_up for second in self.seconds)


class Models:
    """Models that the run trains, and others in it: averaged weights, teachers."""

    def __init__(self, setup: RunSetup, gradients: Gradients) -> None:
        self._setup = setup
        self._gradients = gradients
        self.wrapped: dict[int, nn.Module] = {}  # the trained ones, as the loop uses them, by id
        self.whole: list[nn.Module] = []  # the trained ones with all their parameters on this rank
        self.tracked: list[nn.Module] = []  # all models that checkpoints hold
        self.calls = ForwardCalls()
        self.same = SameWeights(self.whole, setup.layout, setup.group.device, self._list_untrained)

    def wrap(self, model: nn.Module, wanted: WrapOptions) -> nn.Module:
        """See `Runtime.wrap`."""
        _check_model(model, list(self.wrapped.values()))
        split, exact = self._setup.split, self._setup.options.exactness is not None
        check_places(list_accelerators(model), self._setup.group.devices, split, exact=exact)
        if split.is_whole:
            self.whole.append(model)
        wrapped = self._gradients.wrap(model, wanted)
        self.calls.watch(wrapped)
        self.wrapped[id(wrapped)] = wrapped
        return wrapped

    def release(self) -> None:
        """Let the wrappers give up the process group, which ends: also those in copies such as averaged weights."""
        for model in (*self.wrapped.values(), *self.tracked):
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    release_wrapper(module)

    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics, and other buffers, over the data ranks."""
        if self._gradients.buffers_differ:
            for model in dict.fromkeys([*map(unwrap, self.wrapped.values()), *self.tracked]):
                average_buffers(model, self._setup.layout)

    def _list_untrained(self) -> list[nn.Module]:
        trained = {id(unwrap(model)) for model in self.wrapped.values()}
        return [model for model in self.tracked if id(model) not in trained]


def _check_model(model: nn.Module, others: list[nn.Module]) -> None:
    """RequestError for a model that is distributed already, or has a trained parameter in common with one of the
    others: two would both average its gradient, and DDP allows each parameter in one model."""
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise RequestError(
            f"the model is in {type(model).__name__} already, and the runtime distributes it", "give it the plain model"
        )
    taken = {id(p) for other in others for p in other.parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if id(parameter) in taken:
            raise RequestError(
                f"{name} of this {type(model).__name__} is in another prepared model too, or this one was prepared"
                " already: the ranks average the gradient of a parameter for one model only",
                "each model once; of two that share layers one nn.Module that holds both and calls them in its"
                " forward: both = rt.prepare(both, …)",
            )
