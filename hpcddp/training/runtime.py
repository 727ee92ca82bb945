"""Helpers for a training loop. Loop, model and optimizer stay the user's own; `hpcddp.runtime` shows such a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import RequestError
from hpcddp.runs.metrics import MetricsFile
from hpcddp.training import collectives
from hpcddp.training.arguments import read_value, read_whole
from hpcddp.training.checkpoint.files import write_whole
from hpcddp.training.checkpoint.tracked import unwrap
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.data.weighing import Count
from hpcddp.training.epochs import Epochs
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.loop import TrainingLoop
from hpcddp.training.objects import Models, TrainingData
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.sharded import Blocks, WrapOptions
from hpcddp.training.parallel.tensor import TensorPlan
from hpcddp.training.prepare import Preparation
from hpcddp.training.report import Report
from hpcddp.training.saves import Saves
from hpcddp.training.steps import Agreement, StepRecord
from hpcddp.training.stopping import FINISH, STOP, StopWatch


class Runtime:
    """The value of `hpcddp.runtime()`: one per training run."""

    def __init__(
        self,
        setup: RunSetup,
        gradients: Gradients,
        watch: StopWatch,
        metrics: MetricsFile,
        report: Report,
        planned: Callable[[BatchPlan], None],
        until_end: ExitStack,
    ) -> None:
        self.group = setup.group
        self.layout = setup.layout
        self.folder = setup.folder
        self.rank = setup.group.rank
        self.world_size = setup.group.world_size
        self.is_main = setup.group.is_first  # rank 0, which prints and writes
        self.device = setup.group.device
        self.devices = setup.group.devices  # several where the job asks for `gpus_per_rank`
        self.seed = setup.options.seed
        self.weights_sha256: str | None = None  # of the tracked models at the end, on rank 0
        self._options = setup.options
        agreement, models, data = Agreement(setup.group.world_size), Models(setup, gradients), TrainingData()
        record = StepRecord(setup, gradients, metrics, agreement)
        self._saves = saves = Saves(setup, watch, agreement, record, report, models, data)
        self._loop = loop = TrainingLoop(setup, gradients, saves)
        self._epochs = Epochs(setup, loop, saves)
        self._preparation = Preparation(setup, gradients, loop, saves, planned, until_end)
        until_end.callback(self._end_body)

    def _end_body(self) -> None:
        self._saves.is_over = True
        self._loop.abandon()

    # ---- the state of the run

    @property
    def exact(self) -> bool:
        """Whether the result is the same, bit for bit, on any number of ranks."""
        return self._options.exactness is not None and not self._saves.checkpointer.deviations

    @property
    def plan(self) -> BatchPlan:
        """How the global batch is dealt to the ranks. RequestError as long as nothing says how large it is."""
        return self._preparation.plan

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self._saves.data.epoch

    @property
    def steps(self) -> int:
        """Optimizer steps since the start of the run, over all attempts.

        In the loop over the loader: of the batches before this one, also after its `optimizer.step()`.
        """
        return self._saves.steps

    @property
    def samples(self) -> int:
        """Samples of this rank's batch, or micro batch, that count: 0 where it has a placeholder only, as in an epoch's
        last batch of fewer samples than ranks."""
        return self._loop.samples

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops here, to be resumed by a later attempt; set on all ranks at the same step."""
        return self._saves.stop_reason

    # ---- models and data

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
        prepared = self._preparation.prepare(objects)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def track(self, **objects: Any) -> None:
        """Save these objects in checkpoints: model=, optimizer=, scheduler= and others that have a state. Resumes from
        the newest checkpoint. `prepare` calls it.

        The keywords are the names in the checkpoint. A collective: call it once, on every rank.
        """
        self._preparation.track(objects)

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
        self._saves.record.record_model(model)
        return self._saves.models.wrap(model, WrapOptions(blocks, tensor_plan, options))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model inside of what `prepare` made of it."""
        return unwrap(model)

    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        count: Count | None = None,
        items_per_step: int | None = None,
    ) -> TrainingLoader:
        """The training data: this rank's share of each global batch, on the device. `prepare` calls it.

        Of a DataLoader its options are taken over; batch_size is the global batch. A data set is shuffled and read
        without workers. `count(batch)` returns how many parts (tokens, pixels) of a micro batch count, or their
        weights' sum, on the host; None: its samples. An IterableDataset has its own order.

        A DataLoader with `batch_sampler` or `batch_size=None` makes its own batches. Each is one rank's micro batch,
        and `items_per_step` of them, over all ranks, are a step.

        The second one is more data for the same steps, as `for a, b in zip(first, second)`; see `SecondLoader`.
        """
        return self._preparation.loader(data, count=count, items_per_step=items_per_step)

    def evaluation_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None
    ) -> EvaluationLoader:
        """This rank's share of a data set for evaluation: every sample on exactly one data rank, in order, and the same
        number of batches on every rank.

        `batch_size` is the global batch; a DataLoader brings its own, and `drop_last`. BatchNorm's running statistics
        are averaged over the ranks when a loop over it starts: a collective. The ranks compare what they gave to this
        call when they agree next.
        """
        return self._preparation.evaluation_loader(data, batch_size)

    # ---- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, which counts from the start of the run: two more after `rt.epochs(3)`
        are `rt.epochs(5)`. Leaving the inner loop early skips the rest of its epoch.

        If the run has to stop before its end, the `with` body is left from here or from the loop over the loader, and
        never between an epoch's last step and the end of its body. A loop that `break`, `return` or an exception that
        the script catches leaves has finished early; `stop`, or an exception that leaves the `with` body, leaves the
        run unfinished.
        """
        return self._epochs.epochs(read_whole(count, "rt.epochs({})", least=0))

    def batches(self, steps: int) -> Iterator[Any]:
        """The batches of the training loader, pass after pass, until the run has made so many steps, which count from
        its start: `for x, y in rt.batches(10_000): …`, a loop without epochs. A run that resumes goes on where it was.

        If the run has to stop before its end, the `with` body is left from here. A loop that `break` or `return` leaves
        has finished early.
        """
        return self._epochs.batches(read_whole(steps, "rt.batches({})", least=0))

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """The micro batches of a batch, each as its samples collate, on the device. With `max_micro_batch` or `exact`
        every loop needs it: `for x, y in rt.micro_batches(batch): rt.backward(loss_fn(model(x), y))`, between
        `optimizer.zero_grad()` and `optimizer.step()`.

        A second loop over the same batch is another pass over it, as two optimizers that take turns need. In a run
        without either it gives the batch as it is.
        """
        return self._loop.micro_batches(batch)

    def backward(self, loss: Tensor, *, summed: bool = False, scaler: GradScaler | None = None, of: Any = None) -> None:
        """In place of `loss.backward()`: the gradients, behind the last micro batch, are those of the mean over the
        global batch.

        The loss is the mean over what counts in this rank's batch or micro batch: samples, or the result of the
        loader's `count`. With `summed` it is a sum over its samples, and the gradients are those of the sum over the
        global batch, as plain torch gives it. A `scaler` scales the backward pass, not the loss that
        is recorded. `of`: where there are two training loaders, the batch that the loss comes from, or a tensor of it;
        None: all that the loop has taken, whose shares on the ranks have to be in proportion.
        """
        self._loop.backward(loss, summed=summed, scaler=scaler, of=of)

    def train_step(
        self,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        *,
        summed: bool = False,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """One pass over a batch: `rt.backward(loss_of(micro_batch))` for each micro batch.

        Returns this rank's losses, detached, one per micro batch: (micro batches,). The optimizer's step follows it.
        """
        losses = []
        for micro_batch in self.micro_batches(batch):
            loss = loss_of(micro_batch)
            self.backward(loss, summed=summed, scaler=scaler)
            losses.append(loss.detach())
        return torch.stack(losses)

    def mean(self, loss: Tensor | float, *, of: Any = None) -> float:
        """The mean over the global batch of a number that is a mean over this rank's batch, such as its loss: the same
        on every rank, in float64. For what decides in the loop: line search, plateau, early stop. Of several micro
        batches: the losses that `train_step` returned. `of`: as in `backward`.

        A collective: call it on every rank. It waits for the device.
        """
        self._saves.check_open("rt.mean")
        return self._loop.mean(loss, of)

    def stop(self, reason: str) -> None:
        """Leave the `with` body after this step; a later attempt resumes it. In and after an epoch's last step: at the
        end of the loop's body.

        One rank is enough. Inside a step the others hear of it a step later, and all stop there; if every rank calls it
        at the same step, all stop after that step.
        """
        self._saves.ask(STOP, reason)

    def finish_early(self, reason: str) -> None:
        """End the loop after this step; the run is finished. Called as `stop` is."""
        self._saves.ask(FINISH, reason)

    # ---- collectives: call these on every rank

    def sum(self, value: collectives.Number) -> collectives.Number:
        """The sum over the data ranks, in float64, whole numbers in int64: of a number a number, of a tensor one of its
        shape.

        Waits for the device: once per epoch, not per step.
        """
        self._saves.check_together("rt.sum")
        return collectives.sum_numbers(value, self.layout.data_size, self.layout.data_group, self.device)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all data ranks, one below the other: all outputs of an evaluation in the order of its data.

        (n, …) on each rank gives (sum of n, …) on every rank; n may differ.
        """
        self._saves.check_together("rt.gather")
        return collectives.gather_rows(rows, self.layout.data_size, self.layout.data_group, self.device)

    def broadcast(self, value: collectives.Value) -> collectives.Value:
        """Rank 0's object, on every rank."""
        self._saves.check_together("rt.broadcast")
        return collectives.broadcast(value, self.world_size, self.device)

    # ---- output of rank 0: call these on every rank all the same

    def print(self, *words: Any, **options: Any) -> None:
        """As `print`, on rank 0 only."""
        if self.is_main:
            print(*words, **{"flush": True} | options)

    def log(self, **numbers: float | Tensor) -> None:
        """Write numbers, or tensors of one element, to metrics.jsonl and where `log_to` says.

        Their step is the last that an optimizer has made. Those of rank 0 count: sum them over the ranks first. To read
        a tensor waits for its device.
        """
        self._saves.report.log(self._loop.steps_made, numbers)

    # ---- saving

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one or nothing is tracked or there is no run folder.

        Inside the loop over the loader it is written when the step is over; after it, and in an epoch's last step, when
        the body of the loop over the epochs is: a resumed run continues after it.
        """
        self._saves.save(inside=self._loop.inside)

    def save_best(self, value: float | Tensor, mode: str = "max") -> bool:
        """Keep a checkpoint of this step, beside the newest ones, if `value` is the largest of the run so far.

        With `mode` "min": the smallest. Rank 0's value counts, NaN never. Where only rank 0 knows it, the others give
        NaN, an infinity or 0; any other value than rank 0's is an error. Returns, on every rank, whether it was the
        best one. A resumed run knows the best value of the attempts before. Call it after the loop over the loader; the
        checkpoint is written at the end of the loop's body.
        """
        loop, saves = self._loop, self._saves
        if loop.is_left:
            self._epochs.end_steps()
        if loop.inside and (saves.last_step is None or not loop.stepped):
            where = "the loop over the loader" if saves.last_step is None else "a step, before optimizer.step()"
            raise RequestError(
                f"rt.save_best(value) came inside {where}",
                "call it after the loop, once per epoch; or in a loop over rt.batches(…), after optimizer.step()",
            )
        return saves.save_best(read_value(value, "rt.save_best({})"), mode, loop.steps_made, inside=loop.inside)

    def save_model(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write the whole weights of a model (None: the only one) to a file that `torch.load` reads anywhere.

        Rank 0 writes it, as a whole. Of an AveragedModel the averaged weights are written, under the model's own names.
        """
        self._saves.check_open("rt.save_model")
        if model is None:
            wrapped = list(self._saves.models.wrapped.values())
            if len(wrapped) != 1:
                raise RequestError(
                    f"rt.save_model(path) does not know which of {len(wrapped)} models", "rt.save_model(path, model)"
                )
            [model] = wrapped
        self._saves.agree("called rt.save_model(path)")
        self._saves.models.average_buffers()
        write_whole(unwrap(model.module if isinstance(model, AveragedModel) else model), Path(path), self.group)

    def finish(self) -> None:
        """The body has ended without an error: last numbers, last checkpoint, state.json. `open_runtime` calls it."""
        saves, stop_reason = self._saves, self._epochs.finish()
        self.weights_sha256 = digest = saves.checkpointer.finish(
            stop_reason, step=self.steps, epoch=self.epoch, finished=saves.finish_reason, asked=saves.counts
        )
        weights = None
        if digest is not None:
            weights = f"sha256 {digest}" + (", the same on any number of ranks" if self.exact else "")
        saves.report.end(self.steps, self.epoch, stop_reason, saves.finish_reason, saves.record.loss, weights)
