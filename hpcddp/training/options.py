"""What the caller of `hpcddp.runtime` asked for, as one value that is checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcddp.batchplan import EXACT_METHODS
from hpcddp.errors import RequestError
from hpcddp.parallelism import Parallel
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.arguments import SaveEvery
from hpcddp.training.parallel.layout import ask_all
from hpcddp.training.rendezvous.group import Group

DEFAULT_SLICES = 8
#: At the end of each epoch, and between epochs after ten minutes of training.
DEFAULT_SAVES = SaveEvery()
DEFAULT_SAVE_S = 600


class Exactness(NamedTuple):
    """How an exact run sums gradients, and into how many fixed slices it cuts each global batch.

    Both are part of the result.
    """

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
    group: Group | None = None  # None: the runtime opens one
    backend: str | None = None  # None: nccl where the rank sees a GPU, else gloo
    timeout_s: float | None = None  # of a collective; None: torch's default
    rendezvous: str = "auto"
    exact: bool | str = False
    slices: int | None = None  # of a global batch in exact mode; None: DEFAULT_SLICES
    log_to: Sequence[str] | None = None  # names of sinks; None: HPCDDP_LOG_TO
    # (name, ranks) of more dimensions whose ranks see the same samples; not an argument of `hpcddp.runtime`
    model_mesh: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.exact and self.slices is not None:
            raise RequestError(f"slices={self.slices} means nothing without exact", "exact=True, or leave out slices")
        if self.exact and self.exact is not True and self.exact not in EXACT_METHODS:
            raise RequestError(f"exact={self.exact!r} is not a way to sum", "exact='tree', or exact='integer'")

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
        """None if the run is not exact."""
        if not self.exact:
            return None
        method = EXACT_METHODS[0] if self.exact is True else self.exact
        return Exactness(method, DEFAULT_SLICES if self.slices is None else self.slices)


# Whether all ranks were given the same options. Each rank works out by itself which samples it gets, when it saves and
# when the ranks meet. With another seed than the others it would get other ranks' samples again, and with another
# `save_every` it would wait for them.


_WHY = {"seed": ": the runtime gives each rank random numbers of its own"}


def check_same_options(
    options: RuntimeOptions, global_batch: int | None, parallel: Parallel, folder: AttemptFolder | None, group: Group
) -> None:
    """RequestError, on every rank, if the ranks were given other options that they have to agree on. A collective.

    Not compared is what one rank may have otherwise: `keep_checkpoints` and `log_to`, which rank 0 alone uses, and time
    limits.
    """
    exactness = options.exactness
    mine = {
        "seed": options.seed,
        "global_batch": global_batch,
        "max_micro_batch": options.max_micro_batch,
        "parallel": str(parallel),
        "exact": False if exactness is None else exactness.method,
        "slices": None if exactness is None else exactness.slices,
        "run_dir": None if folder is None else folder.run.path,
        "save_every": options.save_every,
        "accept": options.accept,
        "keep": options.keep,
    }
    refuse_others(ask_all(mine, group.world_size), "hpcddp.runtime(…, {})")


def refuse_others(everyones: Sequence[Mapping[str, Any]], call: str) -> None:
    """RequestError if a rank's options are not those of rank 0. `call`: where one is given, for the hint."""
    for name, first in everyones[0].items():
        for rank, theirs in enumerate(everyones):
            if _compared(name, theirs[name]) != _compared(name, first):
                raise RequestError(
                    f"the ranks were given different options: {name}={first!r} on rank 0, {name}={theirs[name]!r} on"
                    f" rank {rank}",
                    f"{call.format(f'{name}={first!r}')} on every rank{_WHY.get(name, '')}",
                )


def _compared(name: str, value: Any) -> Any:
    """What has to be the same of this option: rank 0 alone chooses the run, if there is one."""
    if name == "run_dir":
        return value is not None
    return value
