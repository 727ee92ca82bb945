"""What a run is made of: its data, its models, and what its checkpoints hold. `rt.prepare` puts all of it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpcddp.batchplan import BatchPlan, plan_batch
from hpcddp.errors import RequestError
from hpcddp.parallelism import Split
from hpcddp.training import collectives, trial
from hpcddp.training.agreement import Agreement
from hpcddp.training.arguments import check_kind, read_optional, read_whole
from hpcddp.training.checkpoint.checkpointer import Checkpointer
from hpcddp.training.checkpoint.position import find_place, move_to
from hpcddp.training.checkpoint.settings import name_setting
from hpcddp.training.checkpoint.tracked import OwnedStates, unwrap
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.items import ItemSampler, SingleItem, check_first, check_items, check_second
from hpcddp.training.data.loader import InputWait, SecondLoader, TrainingLoader, make_sampler
from hpcddp.training.data.reading import Reading, choose_workers, is_shuffled, read_how
from hpcddp.training.data.sampler import derive_key
from hpcddp.training.data.weighing import Count, Weighing
from hpcddp.training.data_checks import check_data, outline_evaluation
from hpcddp.training.gradient.buffers import BufferMeans
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.progress import KnownParameters
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.parallel.placing import check_places, list_accelerators, place
from hpcddp.training.parallel.sameness import SameWeights
from hpcddp.training.parallel.sharded import Blocks, Wanted
from hpcddp.training.parallel.spread import spread_weights
from hpcddp.training.parallel.strategy import check_uncompiled, check_wanted
from hpcddp.training.parallel.tensor import TensorPlan
from hpcddp.training.parallel.zero import OwnSteps, WholeSteps
from hpcddp.training.remarks import describe_starving, print_warning
from hpcddp.training.report import Report
from hpcddp.training.setup import RunSetup
from hpcddp.training.torch_compat import kept_assignments, note_steps

# The kinds of objects that a run takes over, and their names in a checkpoint.


_KINDS = {nn.Module: "model", Optimizer: "optimizer", LRScheduler: "scheduler", GradScaler: "scaler"}


def check_objects(objects: Sequence[Any]) -> None:
    """RequestError for objects that a run cannot take over."""
    if not objects:
        raise RequestError(
            "rt.prepare() was given nothing", "model, optimizer, loader = rt.prepare(model, optimizer, loader)"
        )
    for thing in objects:
        if isinstance(thing, nn.Module):
            check_made(thing)
        if isinstance(thing, Dataset):
            raise RequestError(
                f"rt.prepare was given a data set, {type(thing).__name__}",
                "give it a DataLoader, or make one with rt.loader(dataset)",
            )
        if isinstance(thing, DataLoader):
            continue
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise RequestError(
                f"rt.prepare was given a {type(thing).__name__}, which has no state_dict() and load_state_dict()",
                "give it models, optimizers, schedulers, scalers, DataLoaders, and what else has both methods",
            )


def check_model(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """RequestError for a model that is distributed already, has no weights yet, or has one of the others'."""
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise RequestError(
            f"the model is in {type(model).__name__} already, and the runtime distributes it", "give it the plain model"
        )
    check_made(model)
    _check_apart(model, others)


def check_made(model: nn.Module) -> None:
    """RequestError for a model with lazy layers that have no weights yet."""
    for name, layer in model.named_modules():
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for tensor in tensors):
            raise RequestError(
                f"{name or 'the model'}, a {type(layer).__name__}, has no weights before its first forward pass",
                "model(next(iter(loader))[0]) once, then make the optimizer, then rt.prepare",
            )


def _check_apart(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """RequestError for a model that is one of the others, or has a trained parameter in common with one.

    DDP allows each parameter in one model: two would both average its gradient.
    """
    taken = {id(p): other for other in others for p in other.parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if id(parameter) in taken:
            other = taken[id(parameter)]
            other = other.module if isinstance(other, DistributedDataParallel) else other
            if other is model:
                raise RequestError(
                    f"this {type(model).__name__} was prepared already",
                    "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call",
                )
            raise RequestError(
                f"{name} of this {type(model).__name__} is in another prepared model too, a {type(other).__name__}:"
                " the ranks average the gradient of a parameter for one model only",
                "one nn.Module that holds both and calls them in its forward: both = rt.prepare(both, …)",
            )


def is_trained(thing: Any) -> bool:
    """Whether it is a model with parameters that an optimizer moves. Averaged weights (EMA) are copies of such."""
    return (
        isinstance(thing, nn.Module)
        and not isinstance(thing, AveragedModel)
        and any(parameter.requires_grad for parameter in thing.parameters())
    )


def name_objects(objects: Sequence[Any]) -> dict[str, Any]:
    """Names for a checkpoint, by kind and order: model, model_2, optimizer, scheduler, scaler, …"""
    named: dict[str, Any] = {}
    for thing in objects:
        kind = next((name for cls, name in _KINDS.items() if isinstance(thing, cls)), type(thing).__name__.lower())
        nth = sum(name == kind or name.startswith(f"{kind}_") for name in named) + 1
        named[kind if nth == 1 else f"{kind}_{nth}"] = thing
    return named


# Which parameters an optimizer steps on each rank, where the model's split asks for another step than its own.


def share_out_steps(
    optimizers: Mapping[str, Optimizer],
    split: Split,
    layout: Layout,
    device: torch.device,
    until_end: ExitStack,
    *,
    exact: bool,
) -> OwnedStates:
    """Under ZeRO-1 each data rank steps its own parameters; in exact mode shards step whole. Undone by `until_end`."""
    steps: dict[str, OwnSteps] = {}
    if split.kind == "zero1" and layout.data_size > 1:
        steps = {name: OwnSteps(thing, layout, device) for name, thing in optimizers.items()}
    for name, thing in optimizers.items():
        if name in steps:
            steps[name].hook(until_end)
        elif split.is_sharded and layout.data_size > 1 and exact:
            WholeSteps(thing).hook(until_end)
    return OwnedStates(steps)


class Preparation:
    """The first half of a `Runtime`: what comes before the loop, and what all ranks do together."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        loop: TrainingLoop,
        checkpointer: Checkpointer,
        report: Report,
        planned: Callable[[BatchPlan], None],
        until_end: ExitStack,
    ) -> None:
        self.group = setup.group
        self.layout = setup.layout
        self.device = setup.group.device
        self.seed = setup.options.seed
        self.folder = setup.folder
        self._options = setup.options
        self._split = setup.split
        self._loop = loop
        self._gradients = gradients
        self._checkpointer = checkpointer
        self._report = report
        self._agreement = Agreement(setup.group)
        self._same = SameWeights(loop.models, setup.layout, setup.group.device, self._list_untrained)
        self._models: dict[int, nn.Module] = {}  # as the loop uses them, by id
        self._plan: BatchPlan | None = None
        self._batch = setup.global_batch
        self._planned = planned
        self._buffers = BufferMeans(setup.layout)
        self._loader: TrainingLoader | None = None
        self._position: dict[str, int] | None = None  # of the newest checkpoint
        self._setup = setup
        self._is_finished = bool(setup.over)
        self._asked = dict(setup.asked or {})
        self._is_over = False
        self._until_end = until_end  # is closed when the body of the runtime ends
        until_end.callback(self._end_body)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank, `device` first: several where the job asks for `gpus_per_rank`."""
        return self.group.devices

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.group.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.group.is_first

    @property
    def summary(self) -> dict[str, str]:
        """Lines, name to text, that the summary at the end has besides the runtime's own; those of rank 0 are shown."""
        return self._report.more

    def _end_body(self) -> None:
        """The `with` body has ended."""
        self._is_over = True

    def _check_open(self, call: str) -> None:
        """RequestError behind the `with` body: of several ranks each would have its own part only."""
        if self._is_over and self.layout.world_size > 1:
            raise RequestError(
                f"{call} came after the `with` body of hpcddp.runtime, when the ranks had parted",
                f"with hpcddp.runtime(…) as rt: …, with {call} at the end of the body",
            )

    def _agree_after_break(self) -> None:
        """Before a collective that a loop may have been left for; see `Runtime`."""

    # ---- for all ranks together: call these on every rank

    def sum(self, value: collectives.Number) -> collectives.Number:
        """The sum over the data ranks, in float64, whole numbers in int64: of a number a number, of a tensor one of its
        shape.

        Waits for the device: once per epoch, not per step.
        """
        self._check_open("rt.sum")
        self._agree_after_break()
        return collectives.sum_over_data_ranks(value, self.layout, self.device)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all data ranks, one below the other: all outputs of an evaluation in the order of its data.

        (n, …) on each rank gives (sum of n, …) on every rank; n may differ.
        """
        self._check_open("rt.gather")
        self._agree_after_break()
        return collectives.gather_rows(rows, self.layout, self.device)

    def broadcast(self, thing: collectives.Thing) -> collectives.Thing:
        """Rank 0's object, on every rank."""
        self._check_open("rt.broadcast")
        self._agree_after_break()
        return collectives.broadcast(thing, self.world_size, self.device)

    # ---- on rank 0 only: call these on every rank all the same

    def print(self, *words: Any, **options: Any) -> None:
        """As `print`, on rank 0 only."""
        if self.is_main:
            self._report.clear()
            print(*words, **{"flush": True} | options)

    def log(self, *unnamed: object, **numbers: float | Tensor) -> None:
        """Write numbers, or tensors of one element, to metrics.jsonl and where `log_to` says.

        Their step is the last that an optimizer has made. Those of rank 0 count: sum them over the ranks first. To read
        a tensor waits for its device.
        """
        if unnamed:
            raise RequestError(
                f"rt.log was given a {type(unnamed[0]).__name__} without a name",
                "rt.log(loss=0.5), or rt.log(**numbers)",
            )
        self._report.log(self._loop.steps_made, numbers)

    # ---- how models are taken over

    def wrap(
        self,
        model: nn.Module,
        *,
        blocks: Blocks | None = None,
        tensor_plan: TensorPlan | None = None,
        **options: Any,
    ) -> nn.Module:
        """The model on this rank's device, distributed over the ranks if there are several. `prepare` calls it. A model
        whose parts are on several of `rt.devices` stays there.

        `hpcddp.runtime(parallel=…)` says how. "ddp" wraps it in torch's DistributedDataParallel; the others shard every
        parameter in place, so make the optimizer afterwards; each module of a class in `blocks` is gathered on its own.
        Where a mesh has tensor ranks, `tensor_plan` says which layers they divide, by the names of modules: "colwise",
        "rowwise" or a style of `torch.distributed.tensor.parallel`; None: the model's attribute `tensor_plan`.
        `options` are those of torch's DDP or fully_shard. Buffers are not broadcast at each forward pass: they are
        averaged before an evaluation and a checkpoint.
        """
        check_model(model, list(self._models.values()))
        wanted = Wanted(blocks, tensor_plan, options)
        check_wanted(self._split, wanted)
        check_uncompiled(model, self._split)
        exact = self._options.exactness is not None
        check_places(list_accelerators(model), self.devices, self._split, exact=exact)
        if self._split.is_whole:
            self._loop.models.append(model)
        wrapped = self._gradients.wrap(model, wanted)
        self._loop.calls.watch(wrapped)
        self._models[id(wrapped)] = wrapped
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model inside of what `prepare` made of it."""
        check_kind(model, nn.Module, "rt.unwrap({})", "model", "model")
        return unwrap(model)

    def _check_first_steps(self) -> None:
        """After each of the first steps of an attempt. A collective."""
        self._same.check_first(self._loop.steps)

    # ---- what comes before the loop

    @property
    def exact(self) -> bool:
        """Whether the result is the same, bit for bit, on any number of ranks."""
        return self._options.exactness is not None and not self._checkpointer.deviations

    @property
    def plan(self) -> BatchPlan:
        """How the global batch is dealt to the ranks. RequestError as long as nothing says how large it is."""
        return self._plan if self._plan is not None else self._make_plan(None)

    def prepare(self, *objects: Any) -> Any:
        """Take over models, optimizers, schedulers, gradient scalers and DataLoaders; returns them in the same order,
        one alone as it is.

            model, optimizer, loader, test = rt.prepare(model, optimizer, loader, test)

        A model comes back on this rank's device and distributed over the ranks (`wrap` has more options); one that is
        not trained comes back with rank 0's weights. The first DataLoader is the training data, and so is each further
        one with shuffle=True; the others are for evaluation. batch_size is the global batch; that of the first counts
        if neither `hpcddp.runtime` nor the job plan gave one. The rest is saved in checkpoints, as `model`, `model_2`,
        `optimizer`, … by kind and order; whatever has a `state_dict()` and `load_state_dict()` can be. Resumes from the
        newest checkpoint. A collective: call it once, on every rank.
        """
        check_objects(objects)
        prepared = list(objects)
        for n, thing in enumerate(objects):  # first, because it says how large the global batch is
            if isinstance(thing, DataLoader) and (self._loader is None or is_shuffled(thing)):
                prepared[n] = self.loader(thing)
            elif isinstance(thing, DataLoader):
                prepared[n] = self.evaluation_loader(thing)
        for n, thing in enumerate(objects):
            if is_trained(thing) and id(thing) not in self._models:
                prepared[n] = self.wrap(thing)
            elif isinstance(thing, nn.Module):
                prepared[n] = place(thing, self.device)
                if id(thing) not in self._models:  # no wrapper gives every rank the weights of rank 0
                    spread_weights(thing, self.device, self.layout)
                    self._gradients.take_along(thing)
        self._gradients.hand_over([thing for thing in objects if isinstance(thing, Optimizer)])
        tracked = [new for old, new in zip(objects, prepared, strict=True) if not isinstance(old, DataLoader)]
        if tracked:
            self.track(**name_objects(tracked))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
        count: Count | None = None,
        items_per_step: int | None = None,
    ) -> TrainingLoader:
        """The training data: this rank's share of each global batch, on the device. `prepare` calls it.

        Of a DataLoader its data set, batch_size (the global batch), workers, persistent_workers, collate_fn,
        shuffle, drop_last and memory pinning are taken over. For a data set the arguments say them; None means torch's
        collate function, shuffled, and on a GPU up to 8 workers, as the rank's CPUs allow (0 for tensors in memory).
        Those stay from epoch to epoch, and see no later change of the data set. `count(batch)` returns how many parts
        (tokens, pixels) of a micro batch count, or their weights' sum, on the host; None: its samples. An
        IterableDataset has its own order.

        A DataLoader with `batch_sampler` or `batch_size=None` makes its own batches. Each is one rank's micro batch,
        and `items_per_step` of them, over all ranks, are a step.

        The second one is more data for the same steps, as `for a, b in zip(first, second)`; see `SecondLoader`.
        """
        how = read_how(
            data, num_workers=num_workers, collate_fn=collate_fn, shuffle=shuffle, choose=self._choose_workers
        )
        number = 1 if self._loader is None else 2 + len(self._loop.seconds)
        items = read_optional(items_per_step, "rt.loader(loader, items_per_step={})")
        check_items(how, items, self.layout.data_size, self._options, counts=count is not None)
        check_data(how, self._setup)
        if number == 1:
            check_first(how, items, self._options, self._batch)
            plan = self._make_plan(how.batch_size, items) if self._plan is None else self._plan
            several, seed = self._options.uses_micro_batches or (items or 0) > 1, self.seed
            self._loop.is_several, self._loop.first_count = several, count
        else:
            several, seed = self._loop.is_several, derive_key("loader", self.seed, number)
            check_second(items, are_several=several)
            plan = self._plan_for(items or how.batch_size, items)
        if trial.current is not None and how.batch_sampler is None:
            data = trial.current.shorten(how.dataset, plan.global_batch, drop_last=how.drop_last)
            how = replace(how, dataset=data)
        sampler = make_sampler(how, plan, self.layout.data_rank, seed)
        note = self._setup.settings.note
        note(name_setting("samples", number), getattr(sampler, "samples", sampler.length))
        note(name_setting("shuffle", number), how.shuffle)
        weighing = Weighing(self._gradients.averaged_over, self.layout, self.device, count, self._gradients.slots)
        write = self._loop.record.note_input if number == 1 else lambda _: None
        waits = InputWait(write, lambda share: self._say_starving(share, how.reading))
        reading = how.reading
        if how.gives_items:
            reading = replace(reading, collate_fn=SingleItem(reading.collate_fn))
        parts: tuple[Any, ...] = (how.dataset, sampler, self.device, weighing, reading, self._loop, waits)
        loader: TrainingLoader
        if number > 1:
            note(name_setting("global_batch", number), plan.global_batch)
            loader = second = SecondLoader(*parts, is_several=several, number=number)
            self._loop.seconds.append(second)
        else:
            loader = self._loader = TrainingLoader(*parts, is_several=several)
        if self._position is not None:  # the objects were tracked before
            self._checkpointer.settle_settings(self._position)
            self._move(self._position, loader)
        return loader

    def _move(self, position: dict[str, int], loader: TrainingLoader) -> None:
        """Let the loader continue at the checkpoint's position."""
        begins_again = self._setup.settings.begins_again
        if isinstance(loader, SecondLoader):
            number = loader.number
            loader.place = find_place(position, number, loader.sampler.length, again=begins_again(number))
        else:
            move_to(position, loader.sampler, again=begins_again())

    def evaluation_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, *, num_workers: int | None = None
    ) -> EvaluationLoader:
        """This rank's share of a data set for evaluation: every sample on exactly one data rank, in order, and the same
        number of batches on every rank.

        `batch_size` is the global batch; a DataLoader brings its own, and `drop_last`. BatchNorm's running statistics
        are averaged over the ranks when a loop over it starts, so each loop is a collective.
        """
        how = read_how(data, num_workers=num_workers, choose=self._choose_workers)
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
        if trial.current is not None:
            how = replace(how, dataset=trial.current.shorten(how.dataset, size))
        self._agreement.note_evaluation(**outline_evaluation(how.dataset, size, drop_last=how.drop_last))
        return EvaluationLoader(
            how.dataset,
            size,
            self.layout,
            self.device,
            how.reading,
            drop_last=how.drop_last,
            forward_is_collective=lambda: self._gradients.forward_is_collective,
            starts=self._start_evaluation,
            gives=self._loop.count_batch,
            begins=self._same.evaluations.begin,
            goes_on=self._same.evaluations.go_on,
        )

    def _start_evaluation(self) -> None:
        self._check_open("a loop over evaluation data")
        self._average_buffers()

    def track(self, **objects: Any) -> None:
        """Save these objects in checkpoints: model=, optimizer=, scheduler= and others that have a state. Resumes from
        the newest checkpoint. `prepare` calls it.

        The keywords are the names in the checkpoint. A collective: call it once, on every rank.
        """
        if self._checkpointer.models() or self._loop.optimizers:
            raise RequestError(
                "this runtime tracks its objects already",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call",
            )
        if self._plan is None and self._batch is None:
            raise RequestError(
                "no global batch was given, and no DataLoader that says it",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader): all of them in one call; or"
                " hpcddp.runtime(global_batch=256)",
            )
        self._gradients.check(objects)
        if not self._split.is_whole:
            self._until_end.enter_context(kept_assignments())
        self._until_end.callback(self._loop.let_go)
        owned = self._share_out(objects)
        fixed = self.layout.data_size > 1 or self._options.exactness is not None
        known = KnownParameters([unwrap(model) for model in self._models.values()], fixed=fixed)
        self._until_end.enter_context(self._loop.hearing(known))
        for thing in objects.values():
            self._loop.take(thing)
        batch = self.plan.global_batch if self._options.exactness or self._plan is not None else None
        self._position = self._checkpointer.track(objects, batch, owned)
        if self._position is not None:
            self._loop.steps = self._position["step"]
            for optimizer in self._loop.optimizers:
                note_steps(optimizer.optimizer)
            for loader in (self._loader, *self._loop.seconds):
                if loader is not None:
                    self._move(self._position, loader)
        unit = " batches of the DataLoader" if isinstance(getattr(self._loader, "sampler", None), ItemSampler) else ""
        self._report.start(f"{self.plan}{unit}", self._position["step"] if self._position is not None else None)

    def _share_out(self, objects: dict[str, Any]) -> OwnedStates:
        optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        exact = self._options.exactness is not None
        return share_out_steps(optimizers, self._split, self.layout, self.device, self._until_end, exact=exact)

    def _make_plan(self, batch_size: int | None, items: int | None = None) -> BatchPlan:
        """The plan for the global batch that was given, else for a DataLoader's `batch_size`; or for `items` a step."""
        batch = items or (self._batch if self._batch is not None else batch_size)
        plan = self._plan_for(batch, items)
        self._plan = plan
        self._planned(plan)
        return plan

    def _plan_for(self, batch: int | None, items: int | None) -> BatchPlan:
        if batch is None:
            raise RequestError(
                "no global batch was given",
                "hpcddp.runtime(global_batch=256), or a DataLoader with batch_size=256, or render --global-batch 256",
            )
        exactness = self._options.exactness
        largest = 1 if items else self._options.max_micro_batch
        return plan_batch(batch, self.layout.data_size, largest, exactness.slices if exactness else None)

    def _choose_workers(self, dataset: Dataset[Any]) -> int:
        return choose_workers(dataset, self.group.cpus, self.device)

    def _say_starving(self, share: float, reading: Reading) -> None:
        print_warning(describe_starving(share, reading.num_workers, self.group.cpus), is_first=self.group.is_first)

    def _average_buffers(self) -> None:
        """Average BatchNorm's running statistics, and other buffers, over the data ranks."""
        if self._gradients.buffers_differ:
            self._buffers.average(unwrap(model) for model in (*self._models.values(), *self._checkpointer.models()))

    def _list_untrained(self) -> list[nn.Module]:
        """The models of this run that no rank trains: averaged weights, teachers."""
        trained = {id(unwrap(model)) for model in self._models.values()}
        return [model for model in self._checkpointer.models() if id(model) not in trained]

    def _need_loader(self) -> TrainingLoader:
        if self._loader is None:
            raise RequestError(
                "this runtime has no training loader yet",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader)",
            )
        return self._loader
