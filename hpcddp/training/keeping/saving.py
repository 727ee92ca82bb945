"""Writing a run's checkpoints, in one of three forms.

`single`: rank 0 writes one file. `sharded`: each rank writes its part of the tensors. `async`: as sharded, from a copy,
while training goes on. Any of them is read by any number of ranks under any strategy: see resuming.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.keeping.checkpoint import (
    STATE,
    begin,
    commit,
    describe_file,
    flush_folder,
    name_step,
    remove_old,
    write_state_file,
)
from hpcddp.training.keeping.fingerprint import describe_objects
from hpcddp.training.keeping.states import gather_whole, list_tensors, make_outline, write_key
from hpcddp.training.keeping.tracking import Tracked
from hpcddp.training.keeping.versions import list_versions

FORMS = ("single", "sharded", "async")


class Saved(NamedTuple):
    """A checkpoint that is there: where training was, and how long it took from the start of its writing."""

    position: dict[str, int]
    seconds: float


def check_form(form: str | None) -> None:
    """RequestError for an unknown form."""
    if form is not None and form not in FORMS:
        raise RequestError(f"checkpoint={form!r} is no way to write one", f"choose one of {', '.join(FORMS)}")


class Writer:
    """Writes checkpoints into one folder; one at a time is under way. Its methods are called on every rank alike."""

    def __init__(self, group: Group, folder: Path, form: str | None, keep: int) -> None:
        self._group = group
        self._folder = folder
        self._form = form
        self._keep = keep
        self._thread: ThreadPoolExecutor | None = None
        self._ranks: Any = None  # the background's own gloo group
        self._under_way: tuple[Path, Future[Saved]] | None = None

    def save(self, tracked: Tracked, position: dict[str, int], facts: dict[str, Any]) -> Saved | None:
        """Write a checkpoint; None if that goes on in the background: ask `poll`, at the latest before the next save.

        LaunchError if it cannot be written; RequestError if it could not be read back.
        """
        started = time.monotonic()
        tree = {"position": position, **tracked.capture()}
        outline = make_outline(tree)
        form = self._form or ("sharded" if tracked.is_split() else "single")
        if self._group.is_first:
            # not while training waits for an asynchronous one
            digest = None if form == "async" else tracked.hash_weights()
            facts = {**position, "form": form, **facts, "objects": describe_objects(tracked.objects), **list_versions()}
            facts |= {"weights_sha256": digest} if digest else {}
        partial = self._begin(position["step"])
        if partial is None:
            return Saved(position, 0.0)
        if form == "single":
            with _told(partial):
                self._write_single(partial, gather_whole(tree, keep=self._group.is_first), facts, started)
            return Saved(position, time.monotonic() - started)
        tensors = {write_key(path): tensor for path, tensor in list_tensors(tree).items()}
        return self._write_parts(partial, tensors, outline, facts, started, wait=form == "sharded")

    def poll(self, *, wait: bool = False) -> Saved | None:
        """What the background has ended since the last call, if anything. LaunchError if it failed."""
        if self._under_way is None:
            return None
        partial, future = self._under_way
        if not (wait or future.done()):
            return None
        self._under_way = None
        with _told(partial):
            return future.result()

    def _begin(self, step: int) -> Path | None:
        """Rank 0 makes the temporary folder; None if the step's checkpoint is there already."""
        answer: list[Path | None] = [None]
        if self._group.is_first:
            with _told(name_step(self._folder, step)):
                answer = [begin(self._folder, step)]
        if self._group.world_size > 1:
            dist.broadcast_object_list(answer, src=0, device=self._group.device)
        return answer[0]

    def _write_single(self, partial: Path, tree: Any, facts: dict[str, Any], started: float) -> None:
        if self._group.is_first:
            self._finish(partial, {STATE: write_state_file(partial, tree)}, facts, started)

    def _write_parts(
        self,
        partial: Path,
        tensors: dict[str, Tensor],
        outline: Any,
        facts: dict[str, Any],
        started: float,
        *,
        wait: bool,
    ) -> Saved | None:
        from hpcddp.training.keeping import sharded  # torch.distributed.checkpoint takes half a second to import

        def end(writing: Future[Any] | None) -> Saved:
            """All ranks' tensors are being written, or are: the rest of the folder."""
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
            return Saved(outline["position"], time.monotonic() - started)

        with _told(partial):
            if wait:
                sharded.write_tensors(partial, tensors)
                return end(None)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpcddp-checkpoint")
                self._ranks = dist.new_group(backend="gloo")
            writing = sharded.start_writing(partial, tensors, self._ranks)
            self._under_way = partial, self._thread.submit(end, writing)
            return None

    def _finish(self, partial: Path, files: dict[str, Any], facts: dict[str, Any], started: float) -> None:
        commit(partial, files, {**facts, "seconds": round(time.monotonic() - started, 3)})
        remove_old(self._folder, self._keep)


@contextmanager
def _told(partial: Path) -> Iterator[None]:
    """Whatever goes wrong with a checkpoint's files names its folder."""
    try:
        yield
    except HpcddpError:
        raise
    except BaseException as error:
        from hpcddp.training.keeping.sharded import is_about_files, tell_cause

        if not is_about_files(error):
            raise
        raise LaunchError(
            f"the checkpoint {partial} could not be written: {tell_cause(error)}",
            "make room there, or choose another run folder; the checkpoints before it are whole",
        ) from error
