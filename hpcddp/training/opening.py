"""Open a runtime: process group, run folder, signals; and close all of it in the right order, also after an error."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import HpcddpError
from hpcddp.parallelism import Parallel, Split, check_goes_with, plan_split, read_parallel
from hpcddp.runs.folder import choose_attempt, find_attempt
from hpcddp.runs.jsonfile import SchemaError, write_object
from hpcddp.runs.lock import HeldError
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.opening import open_attempt, read_planned_batch
from hpcddp.runs.state import write_failure
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.gradient.exact import ExactGradients
from hpcddp.training.gradient.exactness import check_same_conditions, deterministic_kernels
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.mean import MeanGradients
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.own_run import open_run, say_anew
from hpcddp.training.parallel.layout import open_layout
from hpcddp.training.progress import DEFAULT_INTERVAL_S, read_seconds_or_off
from hpcddp.training.pulse import beating
from hpcddp.training.remarks import NOT_CAUGHT, print_warning
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.process_group import open_group, settle_network
from hpcddp.training.rendezvous.shutdown import claim_failure
from hpcddp.training.report import Report
from hpcddp.training.runtime import Runtime
from hpcddp.training.same_options import check_same_options
from hpcddp.training.setup import RunSetup
from hpcddp.training.sinks import choose_sinks
from hpcddp.training.stopping import STOP_FLAGS, SignalFlag, StopTraining, StopWatch, read_deadline
from hpcddp.training.versions import list_numerics, list_versions
from hpcddp.training.watchdog import DEFAULT_STALL_S, Watchdog
from hpcddp.training.with_body import explained

_STOPPED: dict[str, tuple[str, bool]] = {}  # attempts in which this process has stopped in time: why; on rank 0


@contextmanager
def open_runtime(env: MutableMapping[str, str], options: RuntimeOptions) -> Iterator[Runtime]:
    """See `hpcddp.runtime`, which calls this with the process's environment."""
    _end_if_stopped(env)
    folder = choose_attempt(env, options.run_dir)
    batch = options.global_batch
    if batch is None and folder is not None:
        batch = read_planned_batch(folder.run)
    asked = options.parallel or read_parallel(env.get("HPCDDP_PARALLEL") or "ddp", "parallel in the job file")
    sinks, deadline = choose_sinks(options.log_to, env), read_deadline(env)
    interval_s = read_seconds_or_off(env, "HPCDDP_PROGRESS", DEFAULT_INTERVAL_S)
    stall_s = read_seconds_or_off(env, "HPCDDP_WATCHDOG", DEFAULT_STALL_S)
    signals = SignalFlag()
    with ExitStack() as stack:
        stack.enter_context(signals.installed())
        pulse = stack.enter_context(beating(env))
        group = options.group
        if group is None:
            group = stack.enter_context(
                open_group(env, backend=options.backend, timeout_s=options.timeout_s, rendezvous=options.rendezvous)
            )
        check_same_options(options, batch, asked, folder, group)  # before a run is begun
        split = _plan_split(asked, group, options)
        folder, over, loads, is_strict = stack.enter_context(open_run(folder, group, env, options))
        layout = open_layout(group.rank, group.world_size, (*split.model_mesh, *options.model_mesh))
        anew = say_anew(folder, env)
        setup = RunSetup(options, group, layout, split, batch, folder, anew, over, loads, is_strict)
        gradients = stack.enter_context(_open_gradients(env, setup))
        seed_generators("start", options.seed)  # the same on every rank, so that all build the same model
        if folder is not None and group.is_first:
            print_warning(None if signals.are_caught else NOT_CAUGHT, is_first=True)
            open_attempt(folder)
        metrics = stack.enter_context(MetricsFile(folder.metrics if folder is not None and group.is_first else None))
        if options.checkpoint == "async" and group.backend != "gloo" and group.world_size > 1:  # it writes over gloo
            settle_network(env, "gloo", group.members, group.members[group.rank])

        def note(plan: BatchPlan) -> None:
            if folder is not None and group.is_first:
                write_object(folder.versions, _describe(setup, plan))

        watch = StopWatch(signals, deadline, warn=partial(print_warning, is_first=group.is_first))
        report = Report(setup, metrics, watch.pace, sinks=sinks, interval_s=interval_s, deadline=lambda: watch.deadline)
        rt = Runtime(setup, gradients, watch, metrics, report, note, stack)
        stack.enter_context(pulse.following(lambda: rt.steps, watch.move_deadline))
        if stall_s is not None and group.world_size > 1:
            stack.enter_context(Watchdog(group, stall_s, lambda: watch.pace.batches, report.say).watching())
        try:
            with suppress(StopTraining), explained(rt):
                yield rt
            rt.finish()
            if rt.stop_reason in STOP_FLAGS:
                signals.obey()
                _note_stopped(env, rt.stop_reason, is_first=group.is_first)
        except BaseException as error:
            report.fail()
            first = claim_failure(group, error)
            if first.rank == group.rank:
                if not isinstance(error, HpcddpError):  # the caller prints those
                    print(f"hpcddp: {first}", file=sys.stderr, flush=True)
                # another hpcddp's state stays, and that of a run that was finished before
                if folder is not None and not over and not isinstance(error, SchemaError):
                    # So does that of the attempt that has the run now. A disk that refuses this too adds no news.
                    with suppress(HeldError, OSError):
                        write_failure(folder, str(first), step=rt.steps, epoch=rt.epoch)
            raise


def _note_stopped(env: Mapping[str, str], reason: str, *, is_first: bool) -> None:
    attempt = find_attempt(env)
    if attempt is not None:
        _STOPPED[attempt.path] = reason, is_first


def _end_if_stopped(env: Mapping[str, str]) -> None:
    """SystemExit, on every rank, where this attempt was stopped in time before: the signal was for the job, and its end
    is as near as it was, so that another training of the script does not begin. It may have been meant for the same
    run, with other data."""
    attempt = find_attempt(env)
    if attempt is None or attempt.path not in _STOPPED:
        return
    reason, is_first = _STOPPED[attempt.path]
    if is_first:
        print(f"hpcddp: the script ends here: it was stopped ({reason}) in the run before", file=sys.stderr, flush=True)
    raise SystemExit(0)


def _plan_split(asked: Parallel, group: Group, options: RuntimeOptions) -> Split:
    """How the data ranks hold the model. RequestError, on every rank, for what does not fit them or the options."""
    hosts = [member.host for member in group.members]
    split = plan_split(asked, hosts[:: math.prod(size for _, size in options.model_mesh)])
    check_goes_with(split, asked, exact=options.exactness is not None)
    return split


@contextmanager
def _open_gradients(env: MutableMapping[str, str], setup: RunSetup) -> Iterator[Gradients]:
    exactness = setup.options.exactness
    if exactness is None:
        yield MeanGradients(setup.group, setup.layout, setup.split)
        return
    with deterministic_kernels(env):
        check_same_conditions(setup.group)
        slices, method = exactness.slices, exactness.method
        if setup.split.is_sharded and setup.layout.data_size > 1:
            from hpcddp.training.gradient.exact_shards import ExactShards

            gradients: ExactGradients = ExactShards(setup.group, setup.layout, setup.split, slices, method)
        else:
            gradients = ExactGradients(setup.group, setup.layout, slices, method)
        try:
            yield gradients
        finally:
            gradients.close()


def _describe(setup: RunSetup, plan: BatchPlan) -> dict[str, object]:
    """The contents of versions.json."""
    group, exactness = setup.group, setup.options.exactness
    return {
        **list_versions(),
        **list_numerics(group.device),
        "seed": setup.options.seed,
        "plan": plan._asdict(),
        "parallel": str(setup.split),
        "exact": exactness.method if exactness else None,
        "launcher": group.launcher,
        "backend": group.backend,
        "ranks": [member._asdict() for member in group.members],
    }
