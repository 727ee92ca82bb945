"""Functions for training scripts: `hpcddp.env()`, `hpcddp.init()`, `hpcddp.runtime()`, each usable without the next;
and `hpcddp.load()`, which reads what a run has recorded.

An edge: the process's environment is read here and passed on.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcddp.uncaught import Opening, two_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcddp.training.rendezvous.group import Group
    from hpcddp.training.runtime import Runtime


class RankEnvironment(NamedTuple):
    """Place of this process among the ranks, and where rank 0 is. None: the launcher does not say."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str | None
    master_port: int | None
    source: Mapping[str, str]  # the variable or file that each of the others came from


def env() -> RankEnvironment:
    """Place of this process, from what its launcher set. Imports no torch.

    Raises LaunchError if the environment contradicts itself.
    """
    from hpcddp.ranks.launch import Launch

    launch = Launch(os.environ, os.uname().nodename)
    with two_lines():
        info, found = launch.info, launch.rendezvous
    source = {**info.source, **found.source}
    return RankEnvironment(*info[:-1], master_addr=found.master_addr, master_port=found.master_port, source=source)


def load(run: str, kind: str = "step") -> list[dict[str, Any]]:
    """The numbers of a run folder as a list of rows; `pandas.DataFrame(hpcddp.load("runs/train"))` is a table of them.

    `kind` "step" gives one row per optimizer step, over all attempts: a step that was made again is there as it was
    made last. "log" gives what `rt.log` wrote. docs/metrics.md lists the columns.
    Imports no torch and no pandas. RequestError if `run` is no run folder or has no step.
    """
    from hpcddp.runs.compare import read_table

    with two_lines():
        return read_table(run, kind)


def init(
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    arrival_timeout_s: float = 300.0,
    rendezvous: str = "auto",
) -> AbstractContextManager[Group]:
    """The process group for the time of a `with` body, as torch's default group; gives this rank's place and device.

    `backend` None takes nccl where this rank sees a GPU, else gloo. `timeout_s` is torch's limit for a collective
    (None: torch's default). `arrival_timeout_s` limits the wait for all ranks to arrive; then the missing ones are
    named. `rendezvous` is the channel through which the ranks learn where rank 0 is: "auto", or one of "env"
    (variables), "file" (in the run folder), "mpi4py". The body's error passes through on its rank; the other ranks get
    a PeerFailedError that names it. After the body the group is gone, and DDP wrappers cannot be used any more: use
    `model.module`. Raises LaunchError if the environment contradicts itself, ranks are missing or doubled, or two would
    share a GPU.
    """
    _require_torch("hpcddp.init()")
    from hpcddp.training.arguments import check_choice, read_timeout
    from hpcddp.training.rendezvous.store import CHANNELS
    from hpcddp.training.watchdog import open_watched_group

    with two_lines():
        timeout_s = read_timeout(timeout_s, "hpcddp.init(timeout_s={})")
        read_timeout(arrival_timeout_s, "hpcddp.init(arrival_timeout_s={})")
        check_choice(rendezvous, CHANNELS, "hpcddp.init(rendezvous={})")
    return Opening(
        open_watched_group(
            os.environ,
            backend=backend,
            timeout_s=timeout_s,
            arrival_timeout_s=arrival_timeout_s,
            rendezvous=rendezvous,
        ),
        "hpcddp.init(…)",
        "group",
    )


def _require_torch(call: str) -> None:
    from hpcddp.errors import find_missing_library

    missing = find_missing_library(call, "torch")
    with two_lines():
        if missing is not None:
            raise missing


def runtime(
    global_batch: int | None = None,
    seed: int = 0,
    *,
    max_micro_batch: int | None = None,
    parallel: str | Mapping[str, int] | None = None,
    run_dir: str | None = None,
    accept: Sequence[str] = (),
    keep: Sequence[str] = (),
    save_every: int | str | None = None,
    keep_checkpoints: int = 2,
    checkpoint: str | None = None,
    group: Group | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    rendezvous: str = "auto",
    exact: bool | str = False,
    slices: int | None = None,
    log_to: Sequence[str] | None = None,
) -> AbstractContextManager[Runtime]:
    """Helpers for a training loop whose only batch number is the global one, on any number of ranks.

        with hpcddp.runtime(global_batch=256, seed=42) as rt:
            model, optimizer, loader, test = rt.prepare(model, optimizer, loader, test)
            for epoch in rt.epochs(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(loss_fn(model(x), y))
                    optimizer.step()

    `global_batch` is in samples per optimizer step; None takes it from the job plan in the run folder, else from the
    training DataLoader's batch_size. `max_micro_batch` is the largest number of samples of one forward pass, and asks
    for a loop over `rt.micro_batches(batch)`; None: a rank's whole share. `parallel` is "ddp", "zero1", "fsdp", "hsdp",
    or ranks along each dimension, such as {"data": 2, "shard": -1}; None: what the job file says, else "ddp". `run_dir`
    (else HPCDDP_RUN_DIR) is where checkpoints, metrics and state.json go; without either nothing is written. An
    unfinished run is resumed; a finished one makes no step, unless more epochs are asked for. Settings that differ from
    the recorded ones are an error: `accept`, such as ["lr"], takes the new values, `keep` the recorded ones.
    `save_every` is a number of steps, or a time such as "30m"; None saves at the end of each epoch, and between epochs
    every ten minutes. `keep_checkpoints` is how many stay. `checkpoint`: "async" writes them while training continues.
    `group` reuses the one of `hpcddp.init()`. `exact` gives the same weights, bit for bit, on any number of ranks: True
    or "tree" on those whose ranks get a power of two of the `slices` each, "integer" on any. `slices` (8) is the number
    of fixed slices of a global batch: at least the largest number of ranks that the run will use. `log_to` names where
    the numbers of `rt.log` go besides metrics.jsonl: "tensorboard", "mlflow", "wandb"; None: HPCDDP_LOG_TO. The other
    arguments are those of `init`.
    """
    _require_torch("hpcddp.runtime()")
    from hpcddp.parallelism import read_parallel
    from hpcddp.training.arguments import (
        check_choice,
        read_names,
        read_optional,
        read_path,
        read_save_every,
        read_timeout,
        read_whole,
    )
    from hpcddp.training.opening import open_runtime
    from hpcddp.training.options import RuntimeOptions
    from hpcddp.training.rendezvous.store import CHANNELS

    call = "hpcddp.runtime(…, {})".format
    with two_lines():
        check_choice(rendezvous, CHANNELS, call("rendezvous={}"))
        options = RuntimeOptions(
            global_batch=read_optional(global_batch, "hpcddp.runtime(global_batch={})"),
            seed=read_whole(seed, call("seed={}"), least=0),
            max_micro_batch=read_optional(max_micro_batch, call("max_micro_batch={}")),
            parallel=None if parallel is None else read_parallel(parallel, "hpcddp.runtime(parallel=…)"),
            run_dir=read_path(run_dir, call("run_dir={}")),
            accept=read_names(accept),
            keep=read_names(keep),
            save_every=read_save_every(save_every, call("save_every={}")),
            keep_checkpoints=read_whole(keep_checkpoints, call("keep_checkpoints={}")),
            checkpoint=checkpoint,
            group=group,
            backend=backend,
            timeout_s=read_timeout(timeout_s, call("timeout_s={}")),
            rendezvous=rendezvous,
            exact=exact,
            slices=read_optional(slices, call("slices={}")),
            log_to=None if log_to is None else read_names(log_to),
        )
    return Opening(open_runtime(os.environ, options), "hpcddp.runtime(…)", "rt")
