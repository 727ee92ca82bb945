"""The loop helpers. Loop, model and optimizer stay the user's own; `hpcddp.runtime` shows the loop they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import Dataset

from hpcddp.errors import RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.choices import Choices
from hpcddp.training.gradient.backward import run_backward
from hpcddp.training.gradient.buffers import average_buffers
from hpcddp.training.gradient.exact import ExactGradients
from hpcddp.training.gradient.gradients import DdpGradients
from hpcddp.training.gradient.noise import NoiseMeter
from hpcddp.training.gradient.reduction import sum_over_ranks
from hpcddp.training.gradient.stepsum import StepNews, StepSum
from hpcddp.training.gradient.strategy import Blocks, check_strategy
from hpcddp.training.keeping.fingerprint import describe_dataset
from hpcddp.training.keeping.keeper import Keeper, check_position
from hpcddp.training.keeping.metrics import MetricsFile
from hpcddp.training.keeping.runfolder import write_json
from hpcddp.training.keeping.tracking import unwrap
from hpcddp.training.remarks import tell, warn_of_empty_ranks, warn_of_workers
from hpcddp.training.samples.loader import Batch, MicroBatchLoader, Shard, make_sampler
from hpcddp.training.samples.randomness import seed_generators
from hpcddp.training.samples.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.samples.streamsampler import StreamSampler
from hpcddp.training.samples.weighing import Count, Weighing
from hpcddp.training.stopping import StopWatch


class Runtime:
    """What `hpcddp.runtime()` gives: one per training run."""

    def __init__(
        self,
        group: Group,
        choices: Choices,
        gradients: DdpGradients | ExactGradients,
        watch: StopWatch,
        metrics: MetricsFile,
    ) -> None:
        self.group = group
        self.plan = choices.plan
        self.seed = choices.seed
        self.folder = choices.folder
        self.device = group.device
        self.metrics = metrics
        self.steps = 0  # optimizer steps since the very start, over all attempts
        self.stop_reason: str | None = None  # becomes set on all ranks at the same step
        self.weights_sha256: str | None = None  # of the tracked models at the end, on rank 0
        self._choices = choices
        self._watch = watch
        self._gradients = gradients
        self._sums = StepSum(group, gradients.slots)
        self.noise = NoiseMeter(choices.noise_every, group.is_first, gradients.averaged_over)
        self._models: list[nn.Module] = []
        self._batch: Batch | None = None
        self._loader: MicroBatchLoader | None = None
        self._position: dict[str, int] | None = None  # where the newest checkpoint left off
        self._keeper = Keeper(group, choices, watch)

    @property
    def stopping(self) -> bool:
        """The loop ends here and goes on in a later attempt."""
        return self.stop_reason is not None

    @property
    def exact(self) -> bool:
        """Whether the result is to be the same, bit for bit, on any number of ranks."""
        return self._choices.exactness is not None

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self._loader.sampler.epoch if self._loader is not None else 0

    def explain(self, more: str | None = None) -> str:
        """Print the plan on rank 0, such as `256 = 32 ranks x 8 x 1`, and what `more` there is to say; return it."""
        text = "; ".join(filter(None, [f"global batch: {self.plan}", self.group.describe(), more]))
        if self.group.is_first:
            print(f"hpcddp: {text}", flush=True)
        return text

    # ---- before the loop

    def wrap(
        self, model: nn.Module, strategy: str = "ddp", *, blocks: Blocks | None = None, **options: Any
    ) -> nn.Module:
        """The model on this rank's device, shared by the ranks if there is more than one.

        `strategy`: "ddp", torch's DistributedDataParallel around it; "fsdp", every parameter in parts over all ranks,
        in place; "hsdp", in parts over the ranks of a node. Of the last two, each module of a class in `blocks` is
        gathered on its own. `options` are those of torch's DDP or fully_shard. Buffers are not broadcast at each
        forward pass: see `average_buffers`.
        """
        check_strategy(strategy, blocks, exact=self.exact, noise=self._choices.noise_every is not None)
        if strategy != "ddp" and isinstance(self._gradients, DdpGradients):
            return self._gradients.shard(model, strategy, blocks, options)
        self._models.append(model)
        self.noise.watch(model, self.plan)
        return self._gradients.wrap(model.to(self.device), options)

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        count: Count | None = None,
    ) -> MicroBatchLoader:
        """The training data: this rank's micro batches of each global batch, on the device.

        `count(x, y)` tells how many parts (tokens, pixels) of a micro batch count, on the host; None: its samples. The
        order of an IterableDataset is its own: `shuffle` has no part in it.
        """
        if self._loader is not None:
            raise RequestError(
                "this runtime has its training loader already", "use rt.shard(dataset, …) for evaluation"
            )
        tell(warn_of_workers(num_workers), is_first=self.group.is_first)
        sampler = make_sampler(dataset, self.plan, self.group.rank, seed=self.seed, shuffle=shuffle)
        if self._position is not None:
            self._go_on(sampler, self._position)
        self._loader = MicroBatchLoader(
            dataset,
            sampler,
            self.device,
            Weighing(self._gradients.averaged_over, self.group, count),
            num_workers=num_workers,
            collate_fn=collate_fn,
            started=self._loop_begins,
            stopped=lambda: self.stopping,
        )
        if self.folder is not None and self.group.is_first:
            write_json(self.folder.attempt_path / "data.json", describe_dataset(dataset, num_workers))
        return self._loader

    def shard(
        self, dataset: Dataset[Any], batch_size: int, *, num_workers: int = 0, equal_batches: bool = False
    ) -> Shard:
        """This rank's part of a data set for evaluation: every sample on exactly one rank, in order, none twice.

        `equal_batches` gives all ranks equally many batches, with `samples` 0 in one that does not count: a model in
        parts needs that.
        """
        return Shard(
            dataset,
            batch_size,
            self.group.rank,
            self.group.world_size,
            self.device,
            num_workers=num_workers,
            equal_batches=equal_batches,
            meets_in_forward=lambda: isinstance(self._gradients, DdpGradients) and self._gradients.meets_in_forward,
        )

    def track(self, **objects: Any) -> None:
        """What a checkpoint holds: model=, optimizer=, scheduler= and what else has a state. Resumes from the newest
        one.

        Objects come by keyword, and their names are the names in the checkpoint. A collective: call it on every rank.
        """
        if isinstance(self._gradients, DdpGradients):
            self._gradients.check(objects)
        self._position = self._keeper.track(objects)
        if self._position is not None:
            self.steps = self._position["step"]
            if self._loader is not None:
                self._go_on(self._loader.sampler, self._position)

    def _go_on(self, sampler: GlobalBatchSampler | StreamSampler, position: dict[str, int]) -> None:
        check_position(position, seed=self.seed, length=sampler.length)
        sampler.consumed = position["consumed"]

    # ---- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`. Leaving the inner loop early skips the rest of its epoch."""
        sampler = self._need_loader().sampler
        tell(warn_of_empty_ranks(self._models, self.plan, sampler.length), is_first=self.group.is_first)
        while sampler.epoch < count and not self.stopping:
            epoch = sampler.epoch
            seed_generators("epoch", self.seed, epoch)
            yield epoch
            self._watch.pace.epoch_ended()
            if not self.stopping:
                sampler.end_epoch(epoch)
                if self._choices.save_every is None:
                    self.save()

    def _loop_begins(self) -> None:
        """The loop over an epoch's batches begins, at its start or where a resumed run goes on."""
        self._watch.pace.step_began()
        seed_generators("between", self.seed, self.steps)

    @contextmanager
    def micro(self, batch: Batch) -> Iterator[None]:
        """Around forward and backward of one micro batch."""
        current = self._need_current()
        self._batch = batch
        seed_generators("step", self.seed, self.steps, *self._gradients.key(current))
        with self.noise.micro(batch, self.steps), self._gradients.micro(current):
            yield

    def backward(self, loss: Tensor, *, summed: bool = False, scaler: GradScaler | None = None) -> None:
        """Backward from the micro batch's mean loss, weighted so that all gradients add up to the global mean's.

        The mean is over what counts: samples, or what the loader's `count` tells. `summed`: it is the sum over those.
        A `scaler` scales what goes backward, and not the loss that is recorded.
        """
        weight = run_backward(loss, self._batch, self._models, summed=summed, scaler=scaler)
        if weight is not None:
            part = weight / self._gradients.averaged_over
            self._sums.add_loss(loss.detach(), part, self._gradients.slot(self._need_current()))

    def step(self) -> None:
        """After the optimizer's step: count it, exchange flags, save or stop if it is time. On every rank alike."""
        current = self._need_current()
        if not current.last:
            raise RequestError("rt.step() was called in the middle of a step", "call it where batch.last is true")
        epoch, loader = self.epoch, self._need_loader()
        more = self.noise.take(self.steps) | loader.weighing.take()
        loader.sampler.advance(current.total)
        self.steps += 1
        self._batch = None
        left = loader.sampler.steps_left
        self._watch.pace.step_ended(last=left == 0)
        tracked = self._keeper.tracked
        rate = tracked.learning_rate() if tracked is not None else None
        flags = self._watch.flags(left)
        self._learn(self._sums.exchange(current.total, flags, more, step=self.steps, epoch=epoch, lr=rate))
        every = self._choices.save_every
        if self.stopping or (every is not None and self.steps % every == 0):
            self.save()
        self._keeper.poll(self.stop_reason, wait=self.stopping)
        seed_generators("between", self.seed, self.steps)

    def stop(self, reason: str) -> None:
        """End the loop after this step, to go on in a later attempt. Call it on every rank at the same step."""
        self.stop_reason = self.stop_reason or reason

    # ---- collectives outside the loop: call them on every rank

    def total(self, values: Tensor) -> list[float]:
        """A small vector summed over the ranks in float64. Waits for the device: once per epoch, not per step."""
        return sum_over_ranks(values, self.group.world_size)

    def average_buffers(self, model: nn.Module) -> None:
        """Bring BatchNorm's running statistics together over the ranks; do it before an evaluation."""
        if self._gradients.buffers_differ:
            average_buffers(unwrap(model), self.group.world_size)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one or nothing is tracked or there is no run folder."""
        if self._keeper.is_due(self.steps):
            for model in self._keeper.models():
                self.average_buffers(model)
            sampler = self._need_loader().sampler
            position = {"step": self.steps, "epoch": self.epoch, "consumed": sampler.consumed, "seed": self.seed}
            position |= {"samples": sampler.length} if sampler.length is not None else {}
            self._keeper.save(position, {"plan": self.plan._asdict()}, self.stop_reason)

    # ---- the end

    def finish(self) -> None:
        """The body has ended without an error: last numbers, last checkpoint, state.json. `open_runtime` calls it."""
        self._learn(self._sums.drain())
        if self._loader is not None:
            self._loader.close()
        self.save()
        self.weights_sha256 = self._keeper.finish(self.stop_reason, step=self.steps, epoch=self.epoch)

    def _learn(self, news: StepNews | None) -> None:
        """The sums of an earlier step have arrived, the same on every rank."""
        if news is None:
            return
        learnt = self.noise.learn(news.sums) | self._need_loader().weighing.learn(news.sums)
        self.metrics.write("step", **news.numbers | learnt)
        self.stop_reason = self.stop_reason or news.stop

    def _need_loader(self) -> MicroBatchLoader:
        if self._loader is None:
            raise RequestError("this runtime has no training loader yet", "loader = rt.loader(dataset) before the loop")
        return self._loader

    def _need_current(self) -> MicroBatch:
        current = self._need_loader().current
        if current is None:
            raise RequestError("no batch was taken from the loader yet", "for batch in loader: with rt.micro(batch): …")
        return current
