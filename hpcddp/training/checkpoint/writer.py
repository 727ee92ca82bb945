"""Writing a run's checkpoints, in one of three forms.

`single`: rank 0 writes one file. `sharded`: each rank writes its shards of the tensors. `async`: as sharded, from a
copy, while training continues. Any number of ranks can read any of them, under any strategy: see resume.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import HpcddpError, LaunchError
from hpcddp.runs.best import read_best
from hpcddp.training.checkpoint.files import (
    begin,
    commit,
    describe_file,
    flush_folder,
    name_step,
    remove_old,
    write_state_file,
)
from hpcddp.training.checkpoint.fingerprint import describe_objects
from hpcddp.training.checkpoint.manifest import STATE
from hpcddp.training.checkpoint.state_tree import gather_whole, list_tensors, make_outline, write_key
from hpcddp.training.checkpoint.tracked import Tracked
from hpcddp.training.pulse import at_files
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.versions import list_versions


class Saved(NamedTuple):
    """A complete checkpoint."""

    position: dict[str, int]  # of the training
    seconds: float  # from the start of its writing
    weights_sha256: str | None  # on rank 0; None where it was not computed


class Writer:
    """Writes checkpoints into one folder, one at a time. Its methods are called on every rank alike."""

    def __init__(
        self,
        group: Group,
        folder: Path,
        form: str | None,
        keep: int,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """`fence`: raises HeldError, on rank 0, if this attempt may not write to the folder any more."""
        self._group = group
        self._fence = fence
        self._folder = folder
        self._form = form
        self._keep = keep
        self._thread: ThreadPoolExecutor | None = None
        # A gloo group for the thread. It is made while all ranks are surely there: one that dies meanwhile would leave
        # the others waiting for torch's timeout.
        self._ranks: Any = dist.new_group(backend="gloo") if form == "async" else None
        self._under_way: tuple[Path, Future[Saved]] | None = None

    def save(self, tracked: Tracked, position: dict[str, int], facts: dict[str, Any]) -> Saved | None:
        """Write a checkpoint; None if a thread is still writing it: call `poll`, at the latest before the next save.

        LaunchError if it cannot be written; RequestError if it could not be read back.
        """
        started, digest = time.monotonic(), None
        tree = {"position": position, **tracked.capture()}
        outline = tracked.owned.merge_outlines(make_outline(tree))
        partial = self._begin(position["step"])
        form = self._form or ("sharded" if tracked.is_split() else "single")
        gathers = tracked.hashes_split and tracked.is_split()
        if form != "async" and (gathers or self._group.is_first):  # not while training waits for an asynchronous one
            digest = tracked.hash_weights(gather=gathers)
        if self._group.is_first:
            objects = tracked.owned.complete(describe_objects(tracked.objects))
            facts = {**position, "form": form, **facts, "objects": objects, **list_versions()}
            facts |= {"parameter_groups": tracked.groups}
            facts |= {"weights_sha256": digest} if digest else {}
        if partial is None:
            return Saved(position, 0.0, digest)
        if form == "single":
            with _naming(partial):
                whole = gather_whole(tree, keep=tracked.owned.keeps(is_first=self._group.is_first))
                whole = tracked.owned.gather(whole, outline, keep=self._group.is_first)
                self._write_single(partial, whole, facts, started)
            return Saved(position, time.monotonic() - started, digest)
        tensors = {write_key(path): tensor for path, tensor in list_tensors(tree).items()}
        return self._write_shards(partial, tensors, outline, facts, started, wait=form == "sharded")

    def poll(self, *, wait: bool = False) -> Saved | None:
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
        answer: list[Path | None] = [None]
        if self._group.is_first:
            with _naming(name_step(self._folder, step)):
                answer = [begin(self._folder, step)]
        if self._group.world_size > 1:
            dist.broadcast_object_list(answer, src=0, device=self._group.device)
        return answer[0]

    def _write_single(self, partial: Path, tree: Any, facts: dict[str, Any], started: float) -> None:
        if self._group.is_first:
            self._finish(partial, {STATE: write_state_file(partial, tree)}, facts, started)

    def _write_shards(
        self,
        partial: Path,
        tensors: dict[str, Tensor],
        outline: Any,
        facts: dict[str, Any],
        started: float,
        *,
        wait: bool,
    ) -> Saved | None:
        from hpcddp.training.checkpoint import sharded  # torch.distributed.checkpoint takes half a second to import

        def end(writing: Future[Any] | None) -> Saved:
            """Wait until all ranks' tensors are written, then write the rest of the folder."""
            if writing is not None:
                writing.result()
            own = {path.name: describe_file(path) for path in sharded.list_own(partial, self._group.rank)}
            flush_folder(partial)
            parts: list[Any] = [None] * self._group.world_size
            dist.all_gather_object(parts, own, group=self._ranks)
            if self._group.is_first:
                files = {name: description for part in parts for name, description in part.items()}
                files[STATE] = write_state_file(partial, outline)
                self._finish(partial, files, facts, started)
            return Saved(outline["position"], time.monotonic() - started, facts.get("weights_sha256"))

        with _naming(partial):
            if wait:
                sharded.write_tensors(partial, tensors)
                return end(None)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpcddp-checkpoint")
            writing = sharded.start_writing(partial, tensors, self._ranks)
            self._under_way = partial, self._thread.submit(end, writing)
            return None

    @at_files()
    def _finish(self, partial: Path, files: dict[str, Any], facts: dict[str, Any], started: float) -> None:
        self._fence()  # the writing may have taken minutes
        commit(partial, files, {**facts, "seconds": round(time.monotonic() - started, 3)})
        best = read_best(str(self._folder))
        remove_old(self._folder, self._keep, best.step if best is not None else None)


@contextmanager
def _naming(partial: Path) -> Iterator[None]:
    """An error with a checkpoint's files becomes a LaunchError that names its folder."""
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
