"""Whether all ranks were given the same options.

Each rank works out by itself which samples it gets, when it saves and when the ranks meet. With another seed than the
others it would get other ranks' samples again, and with another `save_every` it would wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hpcddp.errors import RequestError
from hpcddp.parallelism import Parallel
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.rendezvous.group import Group

_WHY = {"seed": ": the runtime gives each rank random numbers of its own"}


def check_same_options(
    options: RuntimeOptions, global_batch: int | None, parallel: Parallel, folder: AttemptFolder | None, group: Group
) -> None:
    """RequestError, on every rank, if the ranks were given other options that they have to agree on. A collective.

    Not compared is what one rank may have otherwise: `keep_checkpoints` and `log_to`, which rank 0 alone uses, and time
    limits.
    """
    if group.world_size == 1:
        return
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
        "checkpoint": options.checkpoint,
    }
    everyones: list[Any] = [None] * group.world_size
    dist.all_gather_object(everyones, mine)
    refuse_others(everyones, "hpcddp.runtime(…, {})")


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
