"""Open a runtime: process group, run folder, signals; and close all of it in the right order, also after an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hpcddp.batchplan import BatchPlan
from hpcddp.errors import UNFINISHED, HpcddpError, LaunchError, RequestError
from hpcddp.parallelism import check_goes_with, plan_split, read_parallel
from hpcddp.runs.chain import find_before, find_stop, record_opened
from hpcddp.runs.folder import AttemptFolder, RunFolder, choose_attempt, find_attempt, job_of, show_path
from hpcddp.runs.hang import Hang, read_hang_limits, read_seconds_or_off
from hpcddp.runs.jsonfile import SchemaError, write_object
from hpcddp.runs.lock import is_held_by, release_run
from hpcddp.runs.metrics import MetricsFile
from hpcddp.runs.settings import find_command
from hpcddp.runs.start import (
    FINISHED,
    FRESH,
    RunRequest,
    end_script,
    has_options,
    inspect_run,
    opening_once,
    start_run,
)
from hpcddp.runs.state import open_attempt, read_planned_batch, write_failure
from hpcddp.schedulers.registry import find_current_job
from hpcddp.training.checkpoint.settings import RunSettings
from hpcddp.training.collectives import ask_all, broadcast
from hpcddp.training.data.randomness import seed_generators
from hpcddp.training.gradient.exact import ExactGradients, check_same_conditions, deterministic_kernels
from hpcddp.training.gradient.gradients import Gradients
from hpcddp.training.gradient.mean import MeanGradients
from hpcddp.training.options import RunSetup, RuntimeOptions, check_same_options, find_trial
from hpcddp.training.parallel.layout import open_layout
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.process_group import claim_failure, open_group
from hpcddp.training.report import AT_TERMINAL_S, DEFAULT_INTERVAL_S, Report, choose_sinks
from hpcddp.training.runtime import Runtime
from hpcddp.training.stopping import STOP_FLAGS, SignalFlag, StopTraining, StopWatch, read_deadline
from hpcddp.training.versions import list_numerics, list_versions
from hpcddp.training.watchdog import Watchdog, beating, print_hang
from hpcddp.uncaught import add_line

_NO_TURN = (
    "hpcddp: the run is finished, so that its loop had no turn and set no variable\n"
    "hint: compute behind the loop what is needed there, or keep it in an object that rt.prepare is given"
)


@contextmanager
def _refusing_exit(rt: Runtime) -> Iterator[None]:
    """RequestError where the body is left by an exit that looks like success."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        raise RequestError(
            f"the script left the `with` body by sys.exit() after step {rt.steps}, and the run is not finished",
            'rt.finish_early("reason") or rt.stop("reason") in the loop; sys.exit() after the body',
        ) from error


class OpenedRun(NamedTuple):
    """An attempt at a run: the job's, which its supervisor holds, or one that the script names, which rank 0 holds."""

    attempt: AttemptFolder | None  # None: nothing is written
    over: str = ""  # why the run is finished; empty: there may be steps left
    counts: dict[str, int] | None = None  # epochs or steps of the finished run
    line: str = ""  # what the start does, in words


@contextmanager
def open_run(folder: AttemptFolder | None, group: Group, env: Mapping[str, str]) -> Iterator[OpenedRun]:
    """The attempt's folder, as rank 0 has it. Rank 0 begins the run, or takes it again, and holds it if the job's
    supervisor does not.

    The HpcddpError of `start_run` on rank 0, PeerFailedError on the others; SystemExit on all where ranks of this
    attempt have stopped in time before: the signal was for the job, or its end is as near as it was.
    """
    with ExitStack() as stack:
        opened, error, message = OpenedRun(None), None, None
        try:
            if folder is not None and group.is_first:
                opened = stack.enter_context(_start(folder, env))
        except (HpcddpError, SystemExit) as found:
            error, message = found, str(found) if isinstance(found, HpcddpError) else ""
            if message:
                claim_failure(group, found)
        message, opened = ask_all((message, opened), group.world_size)[0]
        if error is not None:
            raise error
        if message is not None:
            raise PeerFailedError(Failure(0, group.members[0].host, message)) if message else SystemExit(0)
        yield opened


@contextmanager
def _start(folder: AttemptFolder, env: Mapping[str, str]) -> Iterator[OpenedRun]:
    """Open the run of this folder, or the job's, where its script names that one."""
    planned = find_attempt(env)  # by the supervisor, for the job
    if planned is not None and (stop := find_stop(planned, STOP_FLAGS)) is not None:
        where = show_path(stop[0].path)
        end_script(f"hpcddp: no training begins: the job stopped ({stop[1].reason}) in run {where}", 0)
    job = find_current_job(env)
    request = RunRequest(folder.run.path, find_command(env), env.get(FRESH, "")).of_index(
        job.array_index if job is not None else ""
    )
    paths = {os.path.realpath(folder.run.path), os.path.realpath(request.folder)}
    is_planned = planned is not None and os.path.realpath(planned.run.path) in paths
    run = planned.run if planned is not None and is_planned else RunFolder(request.folder)
    with opening_once(run):
        if is_held_by(run, folder.name) and is_planned:
            outlook, is_mine = inspect_run(RunRequest(run.path)), False
            if outlook.state is not None and outlook.state.attempt == folder.name:  # the supervisor could not say it
                print(f"hpcddp: {outlook.describe(by=' by a process of this job')}", file=sys.stderr, flush=True)
        else:
            link = find_before(planned) if planned is not None else None
            before = job_of(link.attempt) if link is not None else ""
            outlook = start_run(request._replace(folder=run.path), folder.name, env, process=os.getpid(), before=before)
            is_mine = True
            print(f"hpcddp: {outlook.describe(_name_new_run(env))}", file=sys.stderr, flush=True)
        if planned is not None and not is_planned:
            record_opened(planned, run)
        state = outlook.state if outlook.kind == FINISHED else None
        try:
            over, counts = (state.reason, state.asked) if state is not None else ("", None)
            yield OpenedRun(run.attempt(folder.name), over, counts, outlook.describe(_name_new_run(env)))
        finally:
            if is_mine:
                release_run(run, folder.name)


def _name_new_run(env: Mapping[str, str]) -> str:
    """The words that begin a new run, for a hint."""
    return "--fresh" if has_options(env) else "another run_dir"


@contextmanager
def open_runtime(env: MutableMapping[str, str], options: RuntimeOptions) -> Iterator[Runtime]:
    """See `hpcddp.runtime`, which calls this with the process's environment."""
    trial = find_trial()
    if trial is not None:
        options = trial.options(options)
    folder = choose_attempt(env, options.run_dir)
    batch = options.global_batch
    if batch is None and folder is not None:
        batch = read_planned_batch(folder.run)
    parallel = options.parallel or read_parallel(env.get("HPCDDP_PARALLEL") or "ddp", "parallel in the job file")
    sinks, deadline = choose_sinks(options.log_to, env), read_deadline(env)
    default_s = AT_TERMINAL_S if sys.stderr.isatty() else DEFAULT_INTERVAL_S
    interval_s = read_seconds_or_off(env, "HPCDDP_PROGRESS", default_s)
    stall_s, end_s = read_hang_limits(env)
    signals = SignalFlag()
    with ExitStack() as stack:
        if trial is not None:
            stack.callback(trial.closed)
        stack.enter_context(signals.installed())
        heartbeat = stack.enter_context(beating(env))
        group = options.group
        if group is None:
            group = stack.enter_context(
                open_group(env, backend=options.backend, timeout_s=options.timeout_s, rendezvous=options.rendezvous)
            )
        check_same_options(options, batch, parallel, group)  # before a run is begun
        split = plan_split(parallel, [member.host for member in group.members])
        check_goes_with(split, parallel, exact=options.exactness is not None)
        folder, over, counts, line = stack.enter_context(open_run(folder, group, env))
        share = partial(broadcast, ranks=group.world_size, device=group.device)
        settings = RunSettings(share, folder, env, options.accept, options.keep, is_first=group.is_first)
        settings.add("exact", "{}, {} slices".format(*options.exactness) if options.exactness else "no")
        setup = RunSetup(
            options=replace(options, seed=settings.choose("seed", options.seed)),
            group=group,
            layout=open_layout(group.rank, group.world_size, split.tensor),
            split=split,
            global_batch=settings.choose("global_batch", batch),
            folder=folder,
            anew=f"begin a new run: {_name_new_run(env)}",
            over=over,
            counts=counts,
            settings=settings,
            trial=trial,
        )
        gradients = stack.enter_context(_open_gradients(env, setup))
        seed_generators("start", setup.options.seed)  # the same on every rank, so that all build the same model
        written = folder if group.is_first else None
        if written is not None:
            open_attempt(written)
        metrics = stack.enter_context(MetricsFile(written and written.metrics))
        watch = StopWatch(signals, deadline)
        report = Report(setup, metrics, watch.pace, sinks=sinks, interval_s=interval_s, deadline=lambda: watch.deadline)
        rt = Runtime(setup, gradients, watch, metrics, report, partial(_write_versions, setup, written), stack)
        if options.group is None:  # it ends with the runtime
            stack.callback(rt._saves.models.release)
        if over:
            add_line(NameError, lambda: _NO_TURN if rt._saves.is_finished else "")
        heartbeat.follow(lambda: rt.steps, watch.move_deadline)
        stack.callback(heartbeat.stop)  # before the ranks part: what the program does then is its own
        if stall_s is not None and group.world_size > 1:
            record = partial(_record_hang, rt)
            watchdog = Watchdog(group, stall_s, end_s, lambda: watch.pace.batches, report.print_line, record)
            stack.enter_context(watchdog.watching())
        try:
            with suppress(StopTraining), _refusing_exit(rt):
                if trial is not None:
                    trial.opened(rt)
                yield rt
            rt.finish()
            if rt._saves.is_finished and group.is_first and sys.stderr.isatty():
                print(f"hpcddp: {line}", file=sys.stderr, flush=True)  # once more, as the last line
            if rt.stop_reason in STOP_FLAGS:
                signals.obey()
        except BaseException as error:
            report.fail()
            first = claim_failure(group, error)
            if first.rank == group.rank:
                if not isinstance(error, HpcddpError):  # the caller prints those
                    print(f"hpcddp: {first}", file=sys.stderr, flush=True)
                # another hpcddp's state stays, and that of a run that was finished before
                if folder is not None and not over and not isinstance(error, SchemaError):
                    # So does that of the attempt that has the run now. A disk that refuses this too adds no news.
                    with suppress(LaunchError):
                        write_failure(folder, str(first), step=rt.steps, epoch=rt.epoch)
            raise
    if rt.stop_reason in STOP_FLAGS:
        # what stands behind the `with` block would take it, or the training before, for a finished one
        line = f"hpcddp: the script ends here: the run stopped ({rt.stop_reason})" if group.is_first else ""
        end_script(line, UNFINISHED if group.world_size == 1 and not env.get("HPCDDP_ATTEMPT") else 0)


def _record_hang(rt: Runtime, hang: Hang) -> None:
    """Record a hang, in another thread than the main one, which waits for ranks that do not come."""
    with suppress(Exception):  # it may hold any lock
        if rt.is_main and rt.folder is not None:
            write_failure(rt.folder, str(hang.error), step=rt.steps, epoch=rt.epoch)
    print_hang(hang)


@contextmanager
def _open_gradients(env: MutableMapping[str, str], setup: RunSetup) -> Iterator[Gradients]:
    exactness, group, layout = setup.options.exactness, setup.group, setup.layout
    if exactness is None:
        yield MeanGradients(group, layout, setup.split)
        return
    with deterministic_kernels(env):
        check_same_conditions(group)
        if setup.split.is_sharded and layout.data_size > 1:
            from hpcddp.training.gradient.exact_shards import ExactShards

            yield ExactShards(group, layout, setup.split, exactness.slices, exactness.method)
        else:
            yield ExactGradients(group, layout, exactness.slices, exactness.method)


def _write_versions(setup: RunSetup, folder: AttemptFolder | None, plan: BatchPlan) -> None:
    """Write versions.json, once the plan of the global batch is known."""
    if folder is None:
        return
    group, exactness = setup.group, setup.options.exactness
    versions = list_versions() | list_numerics(group.device)
    entries = {
        "seed": setup.options.seed,
        "plan": plan._asdict(),
        "parallel": str(setup.split),
        "exact": exactness.method if exactness else None,
        "launcher": group.launcher,
        "backend": group.backend,
        "ranks": [member._asdict() for member in group.members],
    }
    write_object(folder.versions, versions | entries)
