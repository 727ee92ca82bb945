"""Options of `hpcddp.runtime`, the same on all ranks, and the settings decided when a runtime opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpcddp.batchplan import EXACT_METHODS
from hpcddp.errors import RequestError
from hpcddp.parallelism import Parallel, Split
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.arguments import SaveEvery, check_choice
from hpcddp.training.collectives import ask_all
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.rendezvous.group import Group

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    from hpcddp.training.checkpoint.settings import RunSettings
    from hpcddp.training.data.sampler import MicroBatch

DEFAULT_SLICES = 8
#: At the end of each epoch, and inside of one after DEFAULT_SAVE_S of training.
DEFAULT_SAVES = SaveEvery()
DEFAULT_SAVE_S = 600


class Exactness(NamedTuple):
    """How an exact run sums gradients, and into how many slices it cuts each global batch: both change the result."""

    method: str
    slices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """The arguments of `hpcddp.runtime`, which describes them. RequestError for values that do not fit together."""

    global_batch: int | None = None  # samples per optimizer step; None: the job plan's
    seed: int = 0
    max_micro_batch: int | None = None  # samples of the largest forward pass of a rank; None: its whole share
    parallel: Parallel | None = None  # how the ranks split the model; None: HPCDDP_PARALLEL, else ddp
    run_dir: str | None = None  # None: HPCDDP_RUN_DIR
    save_every: SaveEvery = DEFAULT_SAVES
    accept: tuple[str, ...] = ()  # settings whose values may be others than the recorded ones
    keep: tuple[str, ...] = ()  # settings whose recorded values are taken
    keep_checkpoints: int = 2
    checkpoint: str | None = None  # "async": beside the training
    group: Group | None = None  # None: the runtime opens one
    backend: str | None = None  # None: nccl where the rank sees a GPU, else gloo
    timeout_s: float | None = None  # of a collective; None: torch's default
    rendezvous: str = "auto"
    exact: bool | str = False
    slices: int | None = None  # of a global batch in exact mode; None: DEFAULT_SLICES
    log_to: Sequence[str] | None = None  # names of sinks; None: HPCDDP_LOG_TO

    def __post_init__(self) -> None:
        call = "hpcddp.runtime(…, {})".format
        if self.checkpoint is not None:
            check_choice(self.checkpoint, ("async",), call("checkpoint={}"))
        if self.exact and self.exact is not True:
            check_choice(self.exact, EXACT_METHODS, call("exact={}"))
        if not self.exact and self.slices is not None:
            raise RequestError(f"slices={self.slices} means nothing without exact", "exact=True, or leave out slices")

    @property
    def saves_at_epoch_ends(self) -> bool:
        """Whether each epoch ends with a checkpoint."""
        return self.save_every == DEFAULT_SAVES

    @property
    def save_s(self) -> int | None:
        """Seconds of training between two saves, where time decides."""
        return DEFAULT_SAVE_S if self.saves_at_epoch_ends else self.save_every.seconds

    @property
    def uses_micro_batches(self) -> bool:
        """Whether the loop goes over each batch in micro batches, also where there is one."""
        return self.exactness is not None or self.max_micro_batch is not None

    @property
    def exactness(self) -> Exactness | None:
        """The exact mode; None if the run is not exact."""
        if not self.exact:
            return None
        method = EXACT_METHODS[0] if self.exact is True else self.exact
        return Exactness(method, DEFAULT_SLICES if self.slices is None else self.slices)


class TrialHooks(Protocol):
    """Hooks by which a short run of `hpcddp verify` changes and records a training; any other run has no trial.
    `hpcddp/verify/ranks.py` has those that record."""

    def options(self, options: RuntimeOptions) -> RuntimeOptions:
        """The options of `hpcddp.runtime`, as the trial wants them."""

    def opened(self, rt: Any) -> None:
        """The runtime is open, and its body begins."""

    def closed(self) -> None:
        """The body is over, and the ranks have left the process group."""

    def shorten(self, dataset: Dataset[Any], batch: int, *, drop_last: bool = False) -> Dataset[Any]:
        """A data set with a few batches of this one's samples."""

    def key(self, key: tuple[int | str, ...], micro: MicroBatch) -> tuple[int | str, ...]:
        """The key of a micro batch's random numbers, besides the seed and the step."""

    def part_starts(self, micro: MicroBatch) -> None:
        """The loop gets this micro batch now; its random numbers are seeded."""

    def backward(self, loss: Tensor, weight: float | Tensor | None, averaged_over: int) -> None:
        """`rt.backward(loss)`: the loss; `weight / averaged_over` is its part in the loss of the global batch."""

    def step_ends(self) -> None:
        """The loop is done with a batch."""


_trials: list[TrialHooks] = []


def set_trial(hooks: TrialHooks) -> None:
    """The runtimes of this process are those of a trial."""
    _trials[:] = [hooks]


def find_trial() -> TrialHooks | None:
    """The hooks of this process."""
    return _trials[0] if _trials else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The options of the caller, and what follows from them and from the launch."""

    options: RuntimeOptions
    group: Group
    layout: Layout
    split: Split  # of the models over the data ranks
    global_batch: int | None  # of the caller, or of the job plan; None: the training loader says it
    folder: AttemptFolder | None  # None: nothing is written
    anew: str  # how to begin a new run, for the second line of an error
    over: str = ""  # why the run ended, of one that is finished already: no step is left
    counts: dict[str, int] | None = None  # of a finished run: how many epochs or steps; None: it does not say
    settings: RunSettings
    trial: TrialHooks | None


def check_same_options(options: RuntimeOptions, global_batch: int | None, parallel: Parallel, group: Group) -> None:
    """RequestError, on every rank, if the ranks were given other options that they have to agree on: each works out by
    itself which samples it gets and when it saves. A collective.
    """
    names = ("seed", "max_micro_batch", "exact", "slices", "save_every", "accept", "keep", "checkpoint")
    mine = {name: getattr(options, name) for name in names} | {"global_batch": global_batch, "parallel": str(parallel)}
    refuse_others(ask_all(mine, group.world_size), "hpcddp.runtime(…, {})")


def refuse_others(everyones: Sequence[Mapping[str, Any]], call: str) -> None:
    """RequestError if a rank's options are not those of rank 0. `call`: where one is given, for the hint."""
    for name, first in everyones[0].items():
        for rank, theirs in enumerate(everyones):
            if theirs[name] != first:
                why = ": the runtime gives each rank random numbers of its own" if name == "seed" else ""
                raise RequestError(
                    f"the ranks were given different options: {name}={first!r} on rank 0, {name}={theirs[name]!r} on"
                    f" rank {rank}",
                    f"{call.format(f'{name}={first!r}')} on every rank{why}",
                )
