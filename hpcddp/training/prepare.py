"""Takes over what a run is made of: models, optimizers, data. `rt.prepare` puts all of it together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hpcddp.batchplan import BatchPlan, plan_batch
from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training.arguments import read_optional, read_whole
from hpcddp.training.checkpoint.settings import name_setting
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.collectives import ask_all
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.items import ItemSampler, SingleItem, check_items, check_second, describe_items
from hpcddp.training.data.loader import SecondLoader, TrainingLoader, make_sampler
from hpcddp.training.data.reading import DataSource, is_shuffled, read_how
from hpcddp.training.data.sampler import derive_key, find_start
from hpcddp.training.data.weighing import Count, Weighing
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.progress import KnownParameters
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.options import RunSetup, refuse_others
from hpcddp.training.parallel.layout import Layout, spread_weights
from hpcddp.training.parallel.sharded import WrapOptions
from hpcddp.training.parallel.strategy import place
from hpcddp.training.parallel.zero import WholeSteps, ZeroSteps
from hpcddp.training.report import print_warning
from hpcddp.training.saves import Saves
from hpcddp.training.torch_compat import note_steps

#: The names of objects in a checkpoint; any other is called by its class.
_KINDS = {nn.Module: "model", Optimizer: "optimizer", LRScheduler: "scheduler", GradScaler: "scaler"}


def check_objects(objects: Sequence[Any]) -> None:
    """RequestError for objects that a run cannot take over."""
    for one in objects:
        has_state = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        if not has_state and not isinstance(one, DataLoader):
            raise RequestError(
                f"rt.prepare was given a {type(one).__name__}, which has no state_dict() and load_state_dict()",
                "give it models, optimizers, schedulers, scalers, what else has both methods, and data in a DataLoader",
            )


def is_trained_model(one: Any) -> bool:
    """Whether an optimizer moves its parameters: not those of averaged weights (EMA), which are copies."""
    if not isinstance(one, nn.Module) or isinstance(one, AveragedModel):
        return False
    return any(parameter.requires_grad for parameter in one.parameters())


def name_objects(objects: Sequence[Any]) -> dict[str, Any]:
    """Names for a checkpoint, by kind and order: model, model_2, optimizer, scheduler, scaler, …"""
    named: dict[str, Any] = {}
    for one in objects:
        kind = next((name for cls, name in _KINDS.items() if isinstance(one, cls)), type(one).__name__.lower())
        nth = sum(name == kind or name.startswith(f"{kind}_") for name in named) + 1
        named[kind if nth == 1 else f"{kind}_{nth}"] = one
    return named


def share_out_steps(
    optimizers: Mapping[str, Optimizer],
    split: Split,
    layout: Layout,
    device: torch.device,
    until_end: ExitStack,
    *,
    exact: bool,
) -> dict[str, ZeroSteps]:
    """Replace the optimizers' steps, until the body ends, where the split of the model asks for other ones: under
    ZeRO-1, whose steps are returned, each data rank steps its own parameters; in exact mode shards step whole."""
    zero: dict[str, ZeroSteps] = {}
    if layout.data_size > 1 and split.kind == "zero1":
        zero = {name: ZeroSteps(optimizer, layout, device) for name, optimizer in optimizers.items()}
    elif layout.data_size > 1 and split.is_sharded and exact:
        for optimizer in optimizers.values():
            WholeSteps(optimizer).hook(until_end)
    for steps in zero.values():
        steps.hook(until_end)
    return zero


def check_data(source: DataSource, setup: RunSetup) -> None:
    """RequestError if the ranks have different data: other options, lengths, or choices of a Subset. The samples
    themselves are not compared. Warns of a batch_size that was meant for one rank. A collective."""
    layout = setup.layout
    common = source.list_common(sized=setup.global_batch is None)
    if source.batch_sampler is not None:
        common["batch_sampler"] = describe_items(source.batch_sampler, setup.options.seed)
    check_same_data(source.dataset, layout, common)
    size, ranks = source.batch_size, layout.data_size
    if source.is_share and setup.global_batch is None and ranks > 1 and size is not None:
        print_warning(
            f"batch_size={size} of a DataLoader with a DistributedSampler is the global batch here, over all {ranks}"
            f" ranks\nhint: hpcddp.runtime({size * ranks}) for {size} per rank, as in plain DDP, or"
            f" hpcddp.runtime({size})",
            is_first=setup.group.is_first,
        )


def check_same_data(dataset: Dataset[Any], layout: Layout, options: Mapping[str, Any]) -> None:
    """RequestError, on every rank, if the ranks' data sets differ in length or are other parts of a data set, or if a
    rank's DataLoader has other `options`. A collective."""
    everyones = ask_all((options, _count_samples(dataset), _hash_subset(dataset)), layout.world_size)
    refuse_others([theirs for theirs, *_ in everyones], "DataLoader(…, {})")
    for rank, (_, *theirs) in enumerate(everyones):
        if theirs != [*everyones[0][1:]]:
            raise RequestError(
                f"rank {rank} gets other samples of this {type(dataset).__name__} than rank 0: it has {theirs[0]}, and"
                f" rank 0 has {everyones[0][1]}",
                "give every rank the whole data set in one order, not divided by rank: the runtime deals the samples",
            )


def _count_samples(dataset: Dataset[Any]) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None  # a stream


def _hash_subset(dataset: Dataset[Any]) -> str:
    """SHA-256 of which samples a `Subset` chose; a subset of a subset has both choices."""
    digest = hashlib.sha256()
    while isinstance(dataset, Subset):
        digest.update(f"{list(dataset.indices)}\n".encode())
        dataset = dataset.dataset
    return digest.hexdigest()


class Preparation:
    """Takes over models, optimizers and data: `rt.prepare`, and the calls that it is made of."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        loop: TrainingLoop,
        saves: Saves,
        planned: Callable[[BatchPlan], None],
        until_end: ExitStack,
    ) -> None:
        """`planned` is called with the plan of the global batch; `until_end` is closed when the body ends."""
        self._setup, self._group, self._layout, self._options = setup, setup.group, setup.layout, setup.options
        self._gradients, self._loop, self._saves = gradients, loop, saves
        self._models, self._data, self._trial = saves.models, saves.data, setup.trial
        self._planned, self._until_end = planned, until_end
        self._position: dict[str, int] | None = None  # of the newest checkpoint

    @property
    def plan(self) -> BatchPlan:
        """How the global batch is dealt to the ranks. RequestError as long as nothing says how large it is."""
        return self._data.plan or self._make_plan(None)

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """See `Runtime.prepare`."""
        check_objects(objects)
        prepared = list(objects)
        for n, one in enumerate(objects):  # first, because it says how large the global batch is
            if isinstance(one, DataLoader):
                is_training = self._data.first is None or is_shuffled(one)
                prepared[n] = self.loader(one) if is_training else self.evaluation_loader(one)
        for n, one in enumerate(objects):
            if is_trained_model(one) and id(one) not in self._models.wrapped:
                self._saves.record.record_model(one)
                prepared[n] = self._models.wrap(one, WrapOptions(None, None, {}))
            elif isinstance(one, nn.Module):
                prepared[n] = place(one, self._group.device)
                if id(one) not in self._models.wrapped:  # no wrapper gives every rank the weights of rank 0
                    spread_weights(one, self._group.device, self._layout)
                    self._gradients.add_untrained(one)
        self._gradients.hand_over([one for one in objects if isinstance(one, Optimizer)])
        tracked = [new for old, new in zip(objects, prepared, strict=True) if not isinstance(old, DataLoader)]
        if tracked:
            self.track(name_objects(tracked))
        return prepared

    def track(self, objects: dict[str, Any]) -> None:
        """See `Runtime.track`."""
        if self._models.tracked or self._loop.optimizers:
            raise RequestError(
                "this runtime tracks its objects already",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call",
            )
        plan = self._data.plan or self._plan_for(self._setup.global_batch)
        split, exact = self._setup.split, self._options.exactness is not None
        self._gradients.check(objects)
        optimizers = {name: one for name, one in objects.items() if isinstance(one, Optimizer)}
        zero = share_out_steps(optimizers, split, self._layout, self._group.device, self._until_end, exact=exact)
        fixed = self._layout.data_size > 1 or exact
        known = KnownParameters([unwrap(model) for model in self._models.wrapped.values()], fixed=fixed)
        self._until_end.enter_context(self._loop.step_hooks(known))
        for one in objects.values():
            self._loop.follow(one)
        batch = plan.global_batch if exact or self._data.plan is not None else None
        checkpointer = self._saves.checkpointer
        self._position = position = checkpointer.track(objects, batch, zero)
        self._models.tracked += checkpointer.models()
        if position is not None:
            self._saves.steps = position["step"]
            for optimizer in optimizers.values():
                note_steps(optimizer)
            for loader in self._data.loaders:
                self._move(position, loader)
        sampler = self._data.first.sampler if self._data.first is not None else None
        unit = " batches of the DataLoader" if isinstance(sampler, ItemSampler) else ""
        self._saves.report.start(f"{self.plan}{unit}", position["step"] if position is not None else None)

    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        count: Count | None = None,
        items_per_step: int | None = None,
    ) -> TrainingLoader:
        """See `Runtime.loader`."""
        options, known = self._options, self._data
        how = read_how(data)
        number = 1 if known.first is None else 2 + len(known.seconds)
        items = read_optional(items_per_step, "rt.loader(loader, items_per_step={})")
        sizes = {"global_batch": self._setup.global_batch, "max_micro_batch": options.max_micro_batch}
        check_items(how, items, sizes if number == 1 else {}, counts=count is not None)
        check_data(how, self._setup)
        if number == 1:
            plan = known.plan or self._make_plan(how.batch_size, items)
            known.is_several, seed = options.uses_micro_batches or (items or 0) > 1, options.seed
        else:
            seed = derive_key("loader", options.seed, number)
            check_second(items, is_several=known.is_several)
            plan = self._plan_for(how.batch_size, items)
        if self._trial is not None and how.batch_sampler is None:
            how = replace(how, dataset=self._trial.shorten(how.dataset, plan.global_batch, drop_last=how.drop_last))
        sampler = make_sampler(how, plan, self._layout.data_rank, seed)
        add = self._setup.settings.add
        add(name_setting("samples", number), getattr(sampler, "samples", sampler.length))
        add(name_setting("shuffle", number), how.shuffle)
        device, gradients = self._group.device, self._gradients
        weighing = Weighing(gradients.averaged_over, self._layout, device, count, gradients.slots)
        reading = how.reading
        if how.gives_items:
            reading = replace(reading, collate_fn=SingleItem(reading.collate_fn))
        parts: tuple[Any, ...] = (how.dataset, sampler, device, weighing, reading, self._loop)
        loader: TrainingLoader
        if number > 1:
            add(name_setting("global_batch", number), plan.global_batch)
            loader = second = SecondLoader(*parts, is_several=known.is_several, number=number)
            known.seconds.append(second)
        else:
            loader = known.first = TrainingLoader(*parts, is_several=known.is_several)
            self._saves.record.learn = weighing.list_entries
        if self._position is not None:  # the objects were tracked before
            self._saves.checkpointer.compare_settings(self._position)
            self._move(self._position, loader)
        return loader

    def _move(self, position: dict[str, int], loader: TrainingLoader) -> None:
        """Let the loader continue at the checkpoint's position."""
        number = loader.number if isinstance(loader, SecondLoader) else 1
        again = self._setup.settings.begins_again(number)
        start = find_start(position, number, loader.sampler.length, again=again)
        if isinstance(loader, SecondLoader):
            loader.place = start
        else:
            loader.sampler.epoch, loader.sampler.position = start

    def evaluation_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None
    ) -> EvaluationLoader:
        """See `Runtime.evaluation_loader`."""
        how = read_how(data)
        if isinstance(how.dataset, IterableDataset) or how.has_items:
            what = "with an index, not a stream" if not how.has_items else "whose samples make no batches of their own"
            raise RequestError(
                f"evaluation takes a data set {what}",
                "DataLoader(dataset, batch_size=256) of a Dataset with a length; or rt.loader(loader), to train on it",
            )
        size = how.batch_size if batch_size is None else batch_size
        if size is None:
            raise RequestError("rt.evaluation_loader got no batch_size", "rt.evaluation_loader(dataset, 256)")
        size = read_whole(size, "rt.evaluation_loader(dataset, {})")
        if self._trial is not None:
            how = replace(how, dataset=self._trial.shorten(how.dataset, size))
        options = {"batch_size": size, "drop_last": how.drop_last, "samples": _count_samples(how.dataset)}
        self._saves.agreement.record_evaluation(options | {"subset": _hash_subset(how.dataset)[:12]})
        return EvaluationLoader(
            how.dataset,
            size,
            self._layout,
            self._group.device,
            how.reading,
            drop_last=how.drop_last,
            forward_is_collective=lambda: self._gradients.forward_is_collective,
            starts=self._start_evaluation,
            gives=self._loop.count_batch,
            goes_on=self._models.same.evaluation_goes_on,
        )

    def _start_evaluation(self, is_even: bool) -> None:
        if is_even:
            self._models.same.evaluation_begins()
        self._saves.check_open("a loop over evaluation data")
        self._models.average_buffers()

    def _make_plan(self, batch_size: int | None, items: int | None = None) -> BatchPlan:
        """The plan for the global batch that was given, else for a DataLoader's `batch_size`; or for `items` a step."""
        plan = self._data.plan = self._plan_for(self._setup.global_batch or batch_size, items)
        self._planned(plan)
        return plan

    def _plan_for(self, batch: int | None, items: int | None = None) -> BatchPlan:
        size = items or batch
        if size is None:
            raise RequestError(
                "no global batch was given",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call; or"
                " hpcddp.runtime(global_batch=256), or render --global-batch 256",
            )
        exactness = self._options.exactness
        largest = 1 if items else self._options.max_micro_batch
        return plan_batch(size, self._layout.data_size, largest, exactness.slices if exactness else None)
