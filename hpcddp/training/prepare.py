"""What a run is made of: its data, its models, and what its checkpoints hold. `rt.prepare` puts all of it together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpcddp.batchplan import BatchPlan, plan_batch
from hpcddp.errors import RequestError
from hpcddp.runs.lock import note_loaded
from hpcddp.training.arguments import read_whole
from hpcddp.training.checkpoint.checkpointer import Checkpointer
from hpcddp.training.checkpoint.owned_states import OwnedStates
from hpcddp.training.checkpoint.position import move_to
from hpcddp.training.checkpoint.same_data import outline_evaluation
from hpcddp.training.checkpoint.stage_states import StageStates
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader, make_sampler
from hpcddp.training.data.reading import Reading, choose_workers, read_how
from hpcddp.training.data.waiting import InputWait
from hpcddp.training.data.weighing import Count, Weighing
from hpcddp.training.data_facts import DataFacts
from hpcddp.training.gate.beside import watching
from hpcddp.training.gate.parameters import KnownParameters
from hpcddp.training.gate.unprepared import check_optimizers_of, guarding
from hpcddp.training.gradient.buffers import BufferMeans
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.kinds import check_objects, is_trained, name_objects
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.own_steps import share_out_steps
from hpcddp.training.parallel.placing import place
from hpcddp.training.parallel.spread import spread_weights
from hpcddp.training.parallel.stage_norms import StageNorms
from hpcddp.training.pipelined_step import check_staged
from hpcddp.training.remarks import describe_starving, print_warning, warn_of_idle_stages, warn_of_order
from hpcddp.training.report import Report
from hpcddp.training.setup import RunSetup
from hpcddp.training.torch_compat import note_steps
from hpcddp.training.torch_parts import kept_assignments
from hpcddp.training.wrapping import Wrapping


class Preparation(Wrapping):
    """The first half of a `Runtime`: what comes before the loop."""

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
        super().__init__(setup, gradients, loop, report, self._list_untrained)
        self.seed = setup.options.seed
        self.folder = setup.folder
        self._is_finished = bool(setup.over)
        self._anew = setup.anew
        self._batch = setup.global_batch
        self._planned = planned
        self._until_end = until_end  # is closed when the body of the runtime ends
        until_end.callback(self._end_body)
        self._buffers = BufferMeans(setup.layout)
        self._checkpointer = checkpointer
        self._loader: TrainingLoader | None = None
        self._position: dict[str, int] | None = None  # of the newest checkpoint
        self._facts = DataFacts(setup)

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
        not trained comes back with rank 0's weights. The first DataLoader is the training data, the others are for
        evaluation. Its batch_size is the largest micro batch of a rank, and the global batch if neither
        `hpcddp.runtime` nor the job plan gave one. The rest is saved in checkpoints, as `model`, `model_2`,
        `optimizer`, … by kind and order; whatever has a `state_dict()` and `load_state_dict()` can be. Resumes from the
        newest checkpoint. A collective: call it once, on every rank.
        """
        check_objects(objects)
        prepared = list(objects)
        for n, thing in enumerate(objects):  # first, because it says how large the global batch is
            if isinstance(thing, DataLoader) and self._loader is None:
                prepared[n] = self.loader(thing)
            elif isinstance(thing, DataLoader):
                prepared[n] = self.evaluation_loader(thing)
                print_warning(warn_of_order(thing), is_first=self.group.is_first)
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
    ) -> TrainingLoader:
        """The training data: this rank's micro batches of each global batch, on the device. `prepare` calls it.

        Of a DataLoader its data set, batch_size (the largest micro batch), workers, persistent_workers, collate_fn,
        shuffle, drop_last and memory pinning are taken over. For a data set the arguments say them; None means torch's
        collate function, shuffled, and on a GPU up to 8 workers, as the rank's CPUs allow (0 for tensors in memory).
        Those stay from epoch to epoch, and see no later change of the data set. `count(batch)` returns how many parts
        (tokens, pixels) of a micro batch count, or their weights' sum, on the host; None: its samples. An
        IterableDataset has its own order.
        """
        if self._loader is not None:
            raise RequestError(
                "this runtime has its training loader already", "use rt.evaluation_loader(data, …) for evaluation"
            )
        how = read_how(
            data, num_workers=num_workers, collate_fn=collate_fn, shuffle=shuffle, choose=self._choose_workers
        )
        self._facts.look_at(how)
        plan = self._make_plan(how.batch_size) if self._plan is None else self._plan
        sampler = make_sampler(
            how.dataset, plan, self.layout.data_rank, seed=self.seed, shuffle=how.shuffle, drop_last=how.drop_last
        )
        if self._position is not None:
            move_to(self._position, sampler, self._anew)
        weighing = Weighing(self._gradients.averaged_over, self.layout, self.device, count, self._gradients.slots)
        waits = InputWait(self._loop.record.note_input, lambda share: self._say_starving(share, how.reading))
        self._loader = TrainingLoader(
            how.dataset, sampler, self.device, weighing, how.reading, self._loop, waits, how.batch_size
        )
        self._facts.record()
        self._compare_data()
        return self._loader

    def evaluation_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, *, num_workers: int | None = None
    ) -> EvaluationLoader:
        """This rank's share of a data set for evaluation: every sample on exactly one data rank, in order, and the same
        number of batches on every rank.

        `batch_size` is per rank; a DataLoader brings its own. BatchNorm's running statistics are averaged over the
        ranks when a loop over it starts, so each loop is a collective.
        """
        how = read_how(data, num_workers=num_workers, choose=self._choose_workers)
        if isinstance(how.dataset, IterableDataset):
            raise RequestError("evaluation takes a data set with an index, not a stream", "a Dataset with a length")
        size = how.batch_size if batch_size is None else batch_size
        if size is None:
            raise RequestError("rt.evaluation_loader got no batch_size", "rt.evaluation_loader(dataset, 256)")
        size = read_whole(size, "rt.evaluation_loader(dataset, {})")
        self._agreement.note_evaluation(**outline_evaluation(how.dataset, size))
        return EvaluationLoader(
            how.dataset,
            size,
            self.layout,
            self.device,
            how.reading,
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

        The keywords are the names in the checkpoint. Optimizers, schedulers and scalers act at the last micro batch of
        a global batch only. A collective: call it once, on every rank.
        """
        if self._checkpointer.models() or self._loop.gate.optimizers:
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
        if (staged := self._gradients.staged) is not None:
            check_staged(objects)
            optimizers = [thing for thing in objects.values() if isinstance(thing, Optimizer)]
            self._until_end.enter_context(StageNorms(staged.module, staged.links, optimizers).over_all_stages())
        self._until_end.callback(self._loop.let_go)
        owned = StageStates(objects, staged.module, staged.links) if staged else self._share_out(objects)
        for thing in objects.values():
            self._loop.gate.take(thing)
        check_optimizers_of(list(self._models.values()), self._loop.gate)
        fixed = self.layout.data_size > 1 or self._options.exactness is not None
        self._loop.gate.known = KnownParameters([unwrap(model) for model in self._models.values()], fixed=fixed)
        self._until_end.enter_context(guarding(self._loop.gate, self._loop, list(self._models.values())))
        self._until_end.enter_context(watching(self._loop.gate))
        batch = self.plan.global_batch if self._options.exactness or self._plan is not None else None
        self._position = self._checkpointer.track(objects, batch, owned)
        if self._position is not None:
            self._loop.steps = self._position["step"]
            self._loop.open_epoch = self._position.get("open_epoch")
            for optimizer in self._loop.gate.optimizers:
                note_steps(optimizer.optimizer)
            if self._loader is not None:
                move_to(self._position, self._loader.sampler, self._anew)
        self._compare_data()
        if self.folder is not None and self.group.is_first:
            note_loaded(self.folder.run, self.folder.name)
        self._report.start(str(self.plan), self._position["step"] if self._position is not None else None)

    def _share_out(self, objects: dict[str, Any]) -> OwnedStates:
        optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        exact = self._options.exactness is not None
        return share_out_steps(optimizers, self._split, self.layout, self.device, self._until_end, exact=exact)

    def _make_plan(self, batch_size: int | None) -> BatchPlan:
        """The plan for the global batch that was given, else for a DataLoader's `batch_size`."""
        options, exactness = self._options, self._options.exactness
        batch = self._batch if self._batch is not None else batch_size
        if batch is None:
            raise RequestError(
                "no global batch was given",
                "hpcddp.runtime(global_batch=256), or a DataLoader with batch_size=256, or render --global-batch 256",
            )
        largest = options.max_micro_batch
        if largest is None and exactness is None:
            largest = batch_size
        plan = plan_batch(batch, self.layout.data_size, largest, exactness.slices if exactness else None)
        self._plan = plan
        print_warning(warn_of_idle_stages(plan, self._split.pipeline), is_first=self.group.is_first)
        self._planned(plan)
        return plan

    def _compare_data(self) -> None:
        """Say it if a checkpoint was loaded and was trained with other data. RequestError as `describe_other`."""
        if self._position is not None:
            other = self._facts.describe_other(self._checkpointer.old_data)
            if other is not None:
                self._report.say(f"resumed at step {self._position['step']}: {other}; the script's is in force")

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
