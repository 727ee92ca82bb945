"""What a checkpoint holds, and bringing it back. Nothing in it depends on the number of ranks."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.buffers import average_buffers
from hpcddp.training.checkpoint import find_newest, read_checkpoint, remove_old, set_aside, write_checkpoint
from hpcddp.training.fingerprint import describe_objects, hash_states
from hpcddp.training.group import Group
from hpcddp.training.runfolder import RunFolder
from hpcddp.training.versions import list_versions
from hpcddp.units import shorten


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _first_words(error: Exception) -> str:
    """The first thing that torch lists, and not hundreds of parameters' names."""
    return shorten(" ".join(str(error).split()).partition(": ")[2] or str(error))


class Tracked:
    """The objects that a run consists of, by name: each has `state_dict` and `load_state_dict`."""

    def __init__(self, objects: dict[str, Any]) -> None:
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise RequestError(
                    f"rt.track({name}=…) got a {type(thing).__name__}, which has no state_dict() and load_state_dict()",
                    "track models, optimizers, schedulers, and what else has both methods",
                )
        self.objects = {
            name: unwrap(thing) if isinstance(thing, nn.Module) else thing for name, thing in objects.items()
        }

    def models(self) -> list[nn.Module]:
        return [thing for thing in self.objects.values() if isinstance(thing, nn.Module)]

    def hash_weights(self) -> str:
        """SHA-256 of all models, averaged weights (EMA) included, as they are on this rank: see `hash_states`."""
        return hash_states({name: thing for name, thing in self.objects.items() if isinstance(thing, nn.Module)})

    def learning_rate(self) -> float | None:
        """Of the first parameter group of the first optimizer."""
        optimizers = (thing for thing in self.objects.values() if isinstance(thing, Optimizer))
        return next((float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers), None)

    def save(
        self, group: Group, folder: RunFolder, position: dict[str, int], facts: dict[str, Any], keep: int
    ) -> float:
        """Write a checkpoint and return the seconds it took. A collective, for the models' buffers; rank 0 writes."""
        started = time.monotonic()
        for model in self.models():
            average_buffers(model, group.world_size)
        if group.is_first:
            state = {"position": position, **{name: thing.state_dict() for name, thing in self.objects.items()}}
            facts = {**facts, "weights_sha256": self.hash_weights(), "objects": describe_objects(self.objects)}
            write_checkpoint(folder.checkpoints, position["step"], state, {**position, **facts, **list_versions()})
            remove_old(folder.checkpoints, keep)
        return time.monotonic() - started

    def resume(self, group: Group, folder: RunFolder) -> dict[str, int] | None:
        """Load the newest checkpoint that verifies, the same one on every rank; returns its position. A collective."""
        choice: list[Any] = [None]
        if group.is_first:
            path, damaged = find_newest(folder.checkpoints)
            for bad, fault in damaged.items():
                print(f"hpcddp: checkpoint {bad} is damaged ({fault}); an older one is used", file=sys.stderr)
                set_aside(bad)
            choice = [path]
        if group.world_size > 1:
            dist.broadcast_object_list(choice, src=0, device=group.device)
        if choice[0] is None:
            return None
        state = read_checkpoint(choice[0])
        absent = sorted(self.objects.keys() - state.keys())
        if absent:
            raise RequestError(
                f"checkpoint {choice[0]} has no {', '.join(absent)}, only {', '.join(sorted(state))}",
                "track the objects of the first run, or start anew: --no-resume, or another run folder",
            )
        for name, thing in self.objects.items():
            try:
                thing.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:  # torch's words for: another shape
                raise RequestError(
                    f"checkpoint {choice[0]} does not fit {name} ({type(thing).__name__}): {_first_words(error)}",
                    "take the model and options of the first run, or start anew: --no-resume, or another run folder",
                ) from error
        position: dict[str, int] = state["position"]
        return position
