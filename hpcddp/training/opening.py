"""Open a runtime: process group, run folder, signals; and close all of it in the right order, whatever happens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager

from hpcddp.batchplan import BatchPlan, plan_batch
from hpcddp.errors import HpcddpError, RequestError
from hpcddp.training.bringup.farewell import claim_failure
from hpcddp.training.bringup.group import Group
from hpcddp.training.bringup.process_group import open_group, settle_network
from hpcddp.training.choices import Choices
from hpcddp.training.gradient.exact import ExactGradients
from hpcddp.training.gradient.exactness import Exactness, check_alike, choose_exactness, deterministic_kernels
from hpcddp.training.gradient.gradients import DdpGradients
from hpcddp.training.keeping.metrics import MetricsFile
from hpcddp.training.keeping.runfolder import (
    find_run_folder,
    open_run_folder,
    read_planned_batch,
    write_json,
    write_state,
)
from hpcddp.training.keeping.saving import check_form
from hpcddp.training.keeping.versions import list_numerics, list_versions
from hpcddp.training.runtime import Runtime
from hpcddp.training.samples.randomness import seed_generators
from hpcddp.training.stopping import SignalFlag, StopWatch, read_deadline


@contextmanager
def open_runtime(
    env: MutableMapping[str, str],
    global_batch: int | None = None,
    seed: int = 0,
    *,
    max_micro_batch: int | None = None,
    run_dir: str | None = None,
    resume: bool = True,
    save_every: int | None = None,
    keep: int = 2,
    checkpoint: str | None = None,
    group: Group | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    rendezvous: str = "auto",
    exact: bool | str = False,
    slices: int | None = None,
    noise_every: int | None = None,
) -> Iterator[Runtime]:
    """See `hpcddp.runtime`, which calls this with the process's environment."""
    folder = find_run_folder(env, run_dir)
    batch = global_batch if global_batch is not None else read_planned_batch(folder)
    if batch is None:
        raise RequestError(
            "no global batch was given", "hpcddp.runtime(global_batch=256), or render the job with --global-batch 256"
        )
    exactness = choose_exactness(exact, slices)
    check_form(checkpoint)
    signals = SignalFlag()
    with ExitStack() as stack:
        stack.enter_context(signals.installed())
        if group is None:
            group = stack.enter_context(open_group(env, backend=backend, timeout_s=timeout_s, rendezvous=rendezvous))
        plan = plan_batch(batch, group.world_size, max_micro_batch, exactness.slices if exactness else None)
        gradients = stack.enter_context(_open_gradients(env, group, plan, exactness))
        seed_generators("start", seed)  # the same on every rank, so that models start alike
        if folder is not None and group.is_first:
            open_run_folder(folder)
        metrics = stack.enter_context(MetricsFile(folder.metrics if folder is not None and group.is_first else None))
        if folder is not None and group.is_first:
            members = [member._asdict() for member in group.members]
            facts = {
                "seed": seed,
                "plan": plan._asdict(),
                "exact": exactness.method if exactness else None,
                "launcher": group.launcher,
                "backend": group.backend,
            }
            versions = {**list_versions(), **list_numerics(group.device), **facts, "ranks": members}
            write_json(folder.attempt_path / "versions.json", versions)
        choices = Choices(plan, seed, folder, resume, save_every, keep, checkpoint, exactness, noise_every)
        if checkpoint == "async" and group.backend != "gloo" and group.world_size > 1:  # its own group is gloo
            settle_network(env, "gloo", group.members, group.members[group.rank])
        rt = Runtime(group, choices, gradients, StopWatch(signals, read_deadline(env)), metrics)
        try:
            yield rt
            rt.finish()
        except BaseException as error:
            first = claim_failure(group, error)
            if first.rank == group.rank:
                if not isinstance(error, HpcddpError):  # those say it themselves
                    print(f"hpcddp: {first}", file=sys.stderr, flush=True)
                if folder is not None:
                    write_state(folder, "failed", step=rt.steps, epoch=rt.epoch, reason=str(first))
            raise


@contextmanager
def _open_gradients(
    env: MutableMapping[str, str], group: Group, plan: BatchPlan, exactness: Exactness | None
) -> Iterator[DdpGradients | ExactGradients]:
    if exactness is None:
        yield DdpGradients(group)
        return
    with deterministic_kernels(env):
        check_alike(group)
        gradients = ExactGradients(group, plan, exactness.method)
        try:
            yield gradients
        finally:
            gradients.close()
