"""Writes the checkpoints of a run, and its state.json."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.runs.folder import AttemptFolder, step_of
from hpcddp.runs.lock import check_not_taken
from hpcddp.runs.state import (
    AT_ITS_END,
    MODES,
    Best,
    Manifest,
    read_best,
    read_manifest,
    record_checkpoint,
    write_best,
    write_state,
)
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.files import (
    STATE,
    begin_checkpoint,
    commit,
    continue_provenance,
    describe_file,
    flush_folder,
    make_provenance,
    name_step,
    remove_old,
    write_state_file,
)
from hpcddp.training.checkpoint.resume import choose_newest, load_checkpoint
from hpcddp.training.checkpoint.settings import GivenSettings, LoadedState, describe_settings
from hpcddp.training.checkpoint.tracked import Tracked, format_key, list_tensors, make_outline
from hpcddp.training.collectives import ask_all, broadcast
from hpcddp.training.options import RunSetup
from hpcddp.training.parallel.zero import ZeroSteps
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.stopping import SaveTimer, StopWatch
from hpcddp.training.versions import list_versions

_GUESSED_BYTES_PER_S = 1e8  # of one writer on a busy file system


class WrittenCheckpoint(NamedTuple):
    position: dict[str, int]  # of the training
    seconds: float  # from the start of its writing
    weights_sha256: str | None  # on rank 0; None where it was not computed


class CheckpointWriter:
    """Writes checkpoints into one folder, one at a time: rank 0 all in one file, or each rank its part where none has
    all. Its methods are called on every rank alike."""

    def __init__(
        self,
        group: Group,
        folder: Path,
        keep: int,
        fence: Callable[[], None] = lambda: None,
        *,
        is_async: bool = False,
    ) -> None:
        """`fence`: raises HeldError, on rank 0, if this attempt may not write to the folder any more. `is_async`: a
        thread writes while the training goes on."""
        self._group = group
        self._folder = folder
        self._keep = keep
        self._fence = fence
        # The thread's own gloo group is made now, while all ranks are there: one that dies would leave the others
        # waiting for torch's timeout.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpcddp-checkpoint") if is_async else None
        self._ranks: Any = dist.new_group(backend="gloo") if is_async else None
        self._under_way: tuple[Path, Future[WrittenCheckpoint]] | None = None

    def save(self, tracked: Tracked, position: dict[str, int], entries: dict[str, Any]) -> WrittenCheckpoint | None:
        """Write a checkpoint; None if a thread is still writing it: call `poll`, at the latest before the next save.

        LaunchError if it cannot be written; RequestError if it could not be read back.
        """
        started, is_first = time.monotonic(), self._group.is_first
        tree = {"position": position, **tracked.capture()}
        outline = tracked.merge_outlines(make_outline(tree))
        partial = self._begin(position["step"])
        in_parts = self._thread is not None or tracked.is_in_parts()
        gathers = tracked.hashes_split and tracked.is_split()
        digest = None
        if self._thread is None and (gathers or is_first):  # not while training waits for an asynchronous one
            digest = tracked.hash_weights(gather=gathers)
        if partial is None:
            return WrittenCheckpoint(position, 0.0, digest)
        entries = {**position, **entries, **list_versions()}
        entries |= {"weights_sha256": digest} if digest else {}

        def end(files: dict[str, Any], state: Any) -> WrittenCheckpoint:
            if is_first:
                self._finish(partial, files | {STATE: write_state_file(partial, state)}, entries, started)
            return WrittenCheckpoint(position, time.monotonic() - started, digest)

        with _naming(partial):
            if not in_parts:
                return end({}, tree)
            tensors = {format_key(path): tensor for path, tensor in list_tensors(tree).items()}
            return self._write_parts(partial, tensors, lambda files: end(files, outline))

    def poll(self, *, wait: bool = False) -> WrittenCheckpoint | None:
        """The checkpoint that the thread has completed since the last call, if any. LaunchError if it failed."""
        if self._under_way is None:
            return None
        partial, future = self._under_way
        if not (wait or future.done()):
            return None
        self._under_way = None
        with _naming(partial):
            return future.result()

    def _begin(self, step: int) -> Path | None:
        """Rank 0 makes the temporary folder; None if the step's checkpoint exists already."""
        partial = None
        if self._group.is_first:
            with _naming(name_step(self._folder, step)):
                partial = begin_checkpoint(self._folder, step)
        return broadcast(partial, self._group.world_size, self._group.device)

    def _write_parts(
        self, partial: Path, tensors: dict[str, Tensor], end: Callable[[dict[str, Any]], WrittenCheckpoint]
    ) -> WrittenCheckpoint | None:
        """Each rank writes its part; `end` gets the descriptions of all files, and writes the rest of the folder."""
        from hpcddp.training.checkpoint import sharded  # torch.distributed.checkpoint takes half a second to import

        writing: Future[Any] | None = None

        def wait_and_end() -> WrittenCheckpoint:
            if writing is not None:
                writing.result()
            mine = {path.name: describe_file(path) for path in sharded.list_files_of_rank(partial, self._group.rank)}
            flush_folder(partial)
            everyones = ask_all(mine, self._group.world_size, self._ranks)
            return end({name: description for theirs in everyones for name, description in theirs.items()})

        if self._thread is None:
            sharded.write_tensors(partial, tensors)
            return wait_and_end()
        writing = sharded.start_writing(partial, tensors, self._ranks)
        self._under_way = partial, self._thread.submit(wait_and_end)
        return None

    @at_files()
    def _finish(self, partial: Path, files: dict[str, Any], entries: dict[str, Any], started: float) -> None:
        self._fence()  # the writing may have taken minutes
        commit(partial, files, {**entries, "seconds": round(time.monotonic() - started, 3)})
        best = read_best(str(self._folder))
        remove_old(self._folder, self._keep, best.step if best is not None else None)


@contextmanager
def _naming(partial: Path) -> Iterator[None]:
    """Turn an error with a checkpoint's files into a LaunchError that names its folder."""
    try:
        yield
    except HpcddpError:
        raise
    except BaseException as error:
        from hpcddp.training.checkpoint.sharded import describe_cause, is_about_files

        if not is_about_files(error):
            raise
        raise LaunchError(
            f"the checkpoint {partial} could not be written: {describe_cause(error)}",
            "make room there, or choose another run folder; the checkpoints before it are complete",
        ) from error


class AttemptSaves:
    """When a save of an attempt is due, how long saves take, who may write, state.json.

    The loop of `hpcddp.runtime` and those of frameworks share it. `folder` None: nothing is written. `every_s`: seconds
    of training between two saves; None: time does not say.
    """

    def __init__(self, folder: AttemptFolder | None, watch: StopWatch, *, is_first: bool, every_s: int | None) -> None:
        self.watch = watch
        self.stop_reason: str | None = None  # is set on all ranks at the same step
        self._folder = folder if is_first else None  # None: this rank writes nothing
        self.timer = SaveTimer(every_s) if self._folder is not None and every_s is not None else None

    def accept_stop(self, reason: str | None) -> None:
        """The ranks agree that the run stops here; the first reason stays."""
        self.stop_reason = self.stop_reason or reason

    def begin_training(self) -> None:
        """The time until the next save counts from now."""
        if self.timer is not None:
            self.timer.restart()

    @at_files()
    def check_held(self) -> None:
        """HeldError on rank 0 if another attempt has taken the run."""
        if self._folder is not None:
            check_not_taken(self._folder.run, self._folder.name)

    def save_begins(self) -> None:
        """All ranks save now. HeldError as of `check_held`."""
        self.check_held()
        self.watch.pace.save_began()

    def save_returns(self) -> None:
        """The training goes on; a thread may still write."""
        self.begin_training()
        self.watch.pace.training_resumed()

    def record_saved(self, step: int, epoch: int, seconds: float) -> None:
        """The checkpoint of this step is complete, after so many seconds."""
        self.watch.pace.save_ended(seconds)
        if self.stop_reason is not None:
            self._write("unfinished", self.stop_reason, step, epoch)
        elif self._folder is not None:
            with at_files():
                record_checkpoint(self._folder, step=step, epoch=epoch)

    def end(self, step: int, epoch: int, stop_reason: str | None, finished: str | None = None, **more: Any) -> None:
        """The attempt ends without an error: stopped for this reason, else finished; `finished`: why so early."""
        status = "unfinished" if stop_reason else "finished"
        self._write(status, stop_reason or finished or AT_ITS_END, step, epoch, **more)

    @at_files()
    def _write(self, status: str, reason: str, step: int, epoch: int, **more: Any) -> None:
        if self._folder is not None:
            write_state(self._folder, status, step=step, epoch=epoch, reason=reason, **more)


class Checkpointer:
    """Writes the checkpoints of one run, and resumes from them; without a run folder it does nothing. Its methods are
    called on every rank alike."""

    def __init__(self, setup: RunSetup, saves: AttemptSaves) -> None:
        options, self._group = setup.options, setup.group
        self._saves = saves
        self._exactness, self._settings, self._anew = options.exactness, setup.settings, setup.anew
        self._tracked: Tracked | None = None
        self._loaded: LoadedState | None = None  # until a loop begins
        self._provenance: dict[str, Any] = {}  # empty in a run that is not exact
        self._folder = None if setup.folder is None else Path(setup.folder.run.checkpoints)
        self.may_write_async = self._folder is not None and options.checkpoint == "async"  # the training: it is polled
        self._writer: CheckpointWriter | None = None
        if self._folder is not None:
            keep, is_async = options.keep_checkpoints, self.may_write_async
            self._writer = CheckpointWriter(self._group, self._folder, keep, saves.check_held, is_async=is_async)
        self._saved_at: int | None = None  # step of the newest checkpoint, begun or there
        self._saved: WrittenCheckpoint | None = None  # the newest one of this attempt
        self._best: Best | None = None  # of this attempt, until its file names it

    def track(
        self, objects: dict[str, Any], global_batch: int | None, zero: Mapping[str, ZeroSteps]
    ) -> dict[str, int] | None:
        """Save these objects from now on; returns the position of the newest checkpoint if it was loaded. `zero`: the
        optimizers of which each rank has a part of the state."""
        self._tracked = tracked = Tracked(objects, zero, hashes_split=self._exactness is not None)
        if self._exactness is not None and global_batch is not None:
            self._provenance = make_provenance(self._exactness, global_batch, self._group.device)
        if self._folder is None:
            return None
        make_outline(tracked.capture())  # an object that could not be read back is refused before hours of work
        read_best(str(self._folder))  # and so is a damaged file
        newest, pace = choose_newest(self._group, self._folder, self._anew), self._saves.watch.pace
        self._settings.add("global_batch", global_batch)
        self._settings.compare(describe_settings(tracked.objects), None if newest is None else step_of(newest.name))
        given, position = GivenSettings(tracked.objects, self._settings), None
        states, manifest = dict[str, Any](), Manifest()
        if newest is not None:
            position, states = load_checkpoint(newest, tracked, given.unloaded, self._anew)
            manifest = read_manifest(str(newest)) or manifest
        given.apply(states)
        if position is not None:
            self._saved_at = position["step"]
            pace.expect_tail(manifest.tail_s)
            self._loaded = LoadedState(tracked.objects, self._saved_at)
            if self._provenance:
                self._provenance = continue_provenance(self._provenance, manifest.exact, self._saved_at)
                for deviation in self._provenance["deviations"] if self._group.is_first else ():
                    words = "is no longer" if manifest.exact is not None else "is not"
                    print(f"hpcddp: warning: the run {words} exact: {deviation}", file=sys.stderr)
        if self._saves.watch.deadline is not None and self._group.is_first:
            pace.expect_save(manifest.seconds or guess_save_s(tracked.models()))
        return position

    def compare_settings(self, position: dict[str, int]) -> None:
        """More settings are known than when the checkpoint was loaded. RequestError as of `RunSettings.compare`."""
        self._settings.compare({}, position["step"])

    def begin_training(self, *, is_finished: bool) -> None:
        """A loop begins: record the run's settings. `is_finished`: nothing is left to train. RequestError if what was
        loaded has changed before the first one."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.check()
        self._settings.record(is_finished=is_finished)
        self._saves.begin_training()

    @property
    def deviations(self) -> list[str]:
        """Why an exact run's result may differ from that of a run without interruption."""
        return list(self._provenance.get("deviations", ()))

    def models(self) -> list[nn.Module]:
        return self._tracked.models() if self._tracked is not None else []

    def learning_rate(self) -> float | None:
        """The learning rate of the first parameter group of the first tracked optimizer; None without one."""
        for tracked in self._tracked.objects.values() if self._tracked is not None else ():
            if isinstance(tracked, Optimizer):
                return float(tracked.param_groups[0]["lr"])
        return None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step can be written and does not exist yet."""
        return self._folder is not None and self._tracked is not None and self._saved_at != step

    def save(self, position: dict[str, int], entries: dict[str, Any]) -> None:
        """Write a checkpoint, once the one before is complete. HeldError if another attempt has taken the run."""
        if self._writer is None or self._tracked is None:
            return
        self.poll(wait=True)
        self._saves.save_begins()
        self._saved_at = position["step"]
        exact = {"exact": self._provenance} if self._provenance else {}
        tail = {"tail_s": self._saves.watch.pace.tail_s}  # the next attempt judges by it whether the tail fits
        self._record(self._writer.save(self._tracked, position, {**entries, **exact, **tail}))
        self._saves.save_returns()

    def poll(self, *, wait: bool) -> None:
        """Record a checkpoint that a thread has written, if any. LaunchError if that failed."""
        if self._writer is not None:
            self._record(self._writer.poll(wait=wait))

    def _record(self, saved: WrittenCheckpoint | None) -> None:
        if saved is not None:
            self._saved = saved
            self._saves.record_saved(saved.position["step"], saved.position["epoch"], saved.seconds)

    def is_best(self, value: float, mode: str) -> bool:
        """Whether rank 0's `value` beats the best one of the run so far; what rank 0 says holds for all."""
        if not self._group.is_first and mode in MODES:
            return False
        best = self._best
        if best is None and self._folder is not None:
            best = read_best(str(self._folder))
        return is_better(value, mode, best)

    def propose_best(self, value: float, mode: str, step: int) -> None:
        """The checkpoint of this step is the best one as soon as it is written."""
        self._best = Best(value, mode, step)

    def name_best(self) -> None:
        """Write which checkpoint is the best one, once it is complete, if one was proposed."""
        if self._best is None or self._folder is None:
            return
        self.poll(wait=True)
        if self._group.is_first:
            with at_files():
                write_best(str(self._folder), self._best)
        self._best = None

    def finish(
        self,
        stop_reason: str | None,
        *,
        step: int,
        epoch: int,
        finished: str | None = None,
        asked: Mapping[str, int] | None = None,
    ) -> str | None:
        """Write the final state of an attempt without an error; returns the SHA-256 of the tracked models.

        `finished` is why the training loop ended before its end; `asked`: how many epochs or steps were. The
        hash is there on rank 0; None on the others, without a folder, and for sharded models but those that an exact
        run has saved at this step.
        """
        self.poll(wait=True)
        if self._folder is None or not self._group.is_first:
            return None
        digest = None
        if self._saved is not None and self._saved.position["step"] == step:
            digest = self._saved.weights_sha256
        if digest is None and self._tracked is not None:
            digest = self._tracked.hash_weights()
        more: dict[str, Any] = {} if digest is None else {"weights_sha256": digest}
        if self._provenance:
            more["exact"] = {name: self._provenance[name] for name in ("method", "deviations")}
        if asked and not stop_reason:
            more["asked"] = dict(asked)
        self._saves.end(step, epoch, stop_reason, finished, **more)
        return digest


def is_better(value: float, mode: str, best: Best | None) -> bool:
    """Whether `value` beats the best one; NaN never does. RequestError for another mode than before."""
    if mode not in MODES or (best is not None and best.mode != mode):
        known = best.mode if best is not None else "max"
        before = f", and the best checkpoint so far was chosen by mode={known!r}" if best is not None else ""
        raise RequestError(f"rt.save_best(value, {mode!r}) cannot be{before}", f"rt.save_best(value, {known!r})")
    if best is None:
        return value == value
    return value > best.value if mode == "max" else value < best.value


def check_same_value(values: Sequence[float]) -> None:
    """RequestError if a rank gave another number than rank 0: each has counted its own share of the data.

    NaN, infinities and 0 stand for a number that only rank 0 knows; small differences are rounding's.
    """
    for rank, value in enumerate(values):
        is_known = value != 0 and math.isfinite(value) and math.isfinite(values[0])
        if is_known and not math.isclose(value, values[0], rel_tol=1e-3):
            raise RequestError(
                f"rt.save_best(value) got {values[0]:.6g} on rank 0 and {value:.6g} on rank {rank}: each rank evaluates"
                " its own share of the data",
                "rt.save_best(rt.sum(correct) / samples), with the sums of all ranks",
            )


def guess_save_s(models: Sequence[nn.Module]) -> float:
    """Estimate the seconds of a first save: of the models and, as if Adam trained each, two numbers for each of
    theirs."""
    tensors = list_tensors([model.state_dict() for model in models]).values()
    return 3 * sum(tensor.numel() * tensor.element_size() for tensor in tensors) / _GUESSED_BYTES_PER_S
