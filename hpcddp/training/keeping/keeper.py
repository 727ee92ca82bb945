"""What a run keeps for the attempts after it: checkpoints, and state.json."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.choices import Choices
from hpcddp.training.gradient.exactness import Warrant, carry_on, make_warrant
from hpcddp.training.keeping.checkpoint import name_step, read_manifest
from hpcddp.training.keeping.resuming import last_save_s, resume
from hpcddp.training.keeping.runfolder import RunFolder, write_state
from hpcddp.training.keeping.saving import Saved, Writer
from hpcddp.training.keeping.states import list_tensors, make_outline
from hpcddp.training.keeping.tracking import Tracked
from hpcddp.training.stopping import StopWatch

_PROBE_BYTES = 1 << 22
_STATES_PER_PARAMETER = 2  # an optimizer's numbers that are not there before its first step: as many as Adam's


class Keeper:
    """Keeps one run; its methods are called on every rank alike. Without a folder it does nothing."""

    def __init__(self, group: Group, choices: Choices, watch: StopWatch) -> None:
        self.tracked: Tracked | None = None
        self._group = group
        self._folder = folder = choices.folder
        self._watch = watch
        self._resume = choices.resume
        self._warrant: Warrant | None = None
        if choices.exactness is not None:
            self._warrant = make_warrant(choices.exactness, choices.plan.global_batch, group.device)
        self._writer = Writer(group, folder.checkpoints, choices.checkpoint, choices.keep) if folder else None
        self._weights_sha256: str | None = None
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
            if self._warrant is not None:
                self._warrant = self._carry_on(self._warrant, position["step"], self._folder)
        if self._watch.deadline is not None and self._group.is_first:
            known = last_save_s(self._folder.checkpoints)
            self._watch.pace.expect_save(guess_save_s(self._folder.path, self.tracked) if known is None else known)
        return position

    def models(self) -> list[nn.Module]:
        """The tracked ones."""
        return self.tracked.models() if self.tracked is not None else []

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
        exact = {"exact": self._warrant._asdict()} if self._warrant is not None else {}
        self._note(self._writer.save(self.tracked, position, {**facts, **exact}), stop_reason)
        self._watch.pace.training_goes_on()

    def poll(self, stop_reason: str | None, *, wait: bool) -> None:
        """Learn of a checkpoint that was written beside the training, and of its failure."""
        if self._writer is not None:
            self._note(self._writer.poll(wait=wait), stop_reason)

    def finish(self, stop_reason: str | None, *, step: int, epoch: int) -> str | None:
        """The last words of an attempt that ended well; returns the SHA-256 of the tracked models.

        On rank 0; None on the others, without a folder, and for models in parts.
        """
        self.poll(stop_reason, wait=True)
        if self._folder is None or not self._group.is_first:
            return None
        if self._weights_sha256 is None and self.tracked is not None:
            self._weights_sha256 = self.tracked.hash_weights()
        more: dict[str, Any] = {} if self._weights_sha256 is None else {"weights_sha256": self._weights_sha256}
        if self._warrant is not None:
            more["exact"] = {"method": self._warrant.method, "deviations": self._warrant.deviations}
        reason = stop_reason or "the training loop came to its end"
        self.write_state("continue" if stop_reason else "finished", reason, step=step, epoch=epoch, **more)
        return self._weights_sha256

    def write_state(self, status: str, reason: str, *, step: int, epoch: int, **more: Any) -> None:
        """Write `state.json` on rank 0."""
        if self._folder is not None and self._group.is_first:
            write_state(self._folder, status, step=step, epoch=epoch, reason=reason, **more)

    def _carry_on(self, warrant: Warrant, step: int, folder: RunFolder) -> Warrant:
        """Of an exact run that goes on from its checkpoint of this step; rank 0 warns of what differs."""
        carried = carry_on(warrant, read_manifest(name_step(folder.checkpoints, step)), step)
        if self._group.is_first:
            for deviation in carried.deviations:
                print(f"hpcddp: warning: the run is no longer exact: {deviation}", file=sys.stderr)
        return carried

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
