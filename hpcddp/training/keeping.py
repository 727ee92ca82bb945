"""What a run keeps for the attempts after it: checkpoints, and state.json."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.group import Group
from hpcddp.training.resuming import last_save_s, resume
from hpcddp.training.runfolder import RunFolder, write_state
from hpcddp.training.saving import Saved, Writer
from hpcddp.training.states import list_tensors, make_outline
from hpcddp.training.stopping import StopWatch
from hpcddp.training.tracking import Tracked

_PROBE_BYTES = 1 << 22
_STATES_PER_PARAMETER = 2  # an optimizer's numbers that are not there before its first step: as many as Adam's


class Keeper:
    """Keeps one run; its methods are called on every rank alike. Without a folder it does nothing."""

    def __init__(
        self, group: Group, folder: RunFolder | None, watch: StopWatch, *, form: str | None, keep: int, resume: bool
    ) -> None:
        self.tracked: Tracked | None = None
        self._group = group
        self._folder = folder
        self._watch = watch
        self._resume = resume
        self._writer = Writer(group, folder.checkpoints, form, keep) if folder is not None else None
        self._saved_at: int | None = None

    def track(self, objects: dict[str, Any]) -> dict[str, int] | None:
        """Take these objects into checkpoints; returns the position of the newest one if it was loaded."""
        self.tracked = Tracked(objects)
        if self._folder is None:
            return None
        make_outline(self.tracked.capture())  # an object that could not be read back is refused before hours of work
        position = resume(self._group, self._folder.checkpoints, self.tracked) if self._resume else None
        if position is not None:
            self._saved_at = position["step"]
        if self._watch.deadline is not None and self._group.is_first:
            known = last_save_s(self._folder.checkpoints)
            self._watch.pace.expect_save(guess_save_s(self._folder.path, self.tracked) if known is None else known)
        return position

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step can be written and is not there."""
        return self._folder is not None and self.tracked is not None and self._saved_at != step

    def save(self, position: dict[str, int], facts: dict[str, Any], stop_reason: str | None) -> None:
        """Write a checkpoint, after the one before is there."""
        if self._writer is None or self.tracked is None:
            return
        self.poll(stop_reason, wait=True)
        self._watch.pace.save_began()
        self._saved_at = position["step"]
        self._note(self._writer.save(self.tracked, position, facts), stop_reason)
        self._watch.pace.training_goes_on()

    def poll(self, stop_reason: str | None, *, wait: bool) -> None:
        """Learn of a checkpoint that was written beside the training, and of its failure."""
        if self._writer is not None:
            self._note(self._writer.poll(wait=wait), stop_reason)

    def hash_weights(self) -> str | None:
        """SHA-256 of the tracked models, on rank 0; None on the others, and for models in parts."""
        return self.tracked.hash_weights() if self.tracked is not None and self._group.is_first else None

    def write_state(self, status: str, reason: str, *, step: int, epoch: int, **more: Any) -> None:
        """Write `state.json` on rank 0."""
        if self._folder is not None and self._group.is_first:
            write_state(self._folder, status, step=step, epoch=epoch, reason=reason, **more)

    def _note(self, saved: Saved | None, stop_reason: str | None) -> None:
        if saved is not None:
            self._watch.pace.save_ended(saved.seconds)
            step, epoch = saved.position["step"], saved.position["epoch"]
            reason = stop_reason or f"checkpoint at step {step}; the attempt has not ended"
            self.write_state("continue", reason, step=step, epoch=epoch)


def check_position(position: dict[str, int], *, seed: int, length: int | None) -> None:
    """RequestError if the samples of a checkpoint's epoch were dealt by another seed, or from another data set."""
    samples = position.get("samples", length)
    if samples != length:
        raise RequestError(
            f"the data set has {length} samples, the checkpoint's run had {samples}",
            "go on with the same data, or start anew: --no-resume, or another run folder",
        )
    if position.get("seed", seed) != seed and (length is None or position["consumed"] % length):
        raise RequestError(
            f"seed {seed} would deal the rest of this epoch otherwise than the checkpoint's seed {position['seed']}",
            f"seed={position['seed']} (--seed {position['seed']}), or another run folder",
        )


def guess_save_s(folder: Path, tracked: Tracked) -> float:
    """Seconds that a first save may take: from the bytes of the state, and the time that a small file takes."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in list_tensors(tracked.capture()).values())
    for thing in tracked.objects.values():
        if isinstance(thing, Optimizer) and not thing.state:
            parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
            size += _STATES_PER_PARAMETER * sum(p.numel() * p.element_size() for p in parameters)
    return (1 + size / _PROBE_BYTES) * _probe(folder / f".probe-{os.getpid()}")


def _probe(path: Path) -> float:
    """Seconds to write, flush and hash a few megabytes."""
    content = os.urandom(_PROBE_BYTES)  # some file systems store zeros for nothing
    started = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        hashlib.sha256(content).digest()
        return time.monotonic() - started
    finally:
        path.unlink(missing_ok=True)
