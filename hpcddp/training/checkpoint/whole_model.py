"""A model's weights as one file that plain torch reads."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from hpcddp.errors import LaunchError
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.state_tree import gather_whole, map_tensors, module_state
from hpcddp.training.collectives import broadcast
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.torch_compat import is_failed_write


def write_whole(model: nn.Module, path: Path, group: Group) -> None:
    """Write the state of `model` (not in DDP), whole and on the CPU, as a whole file: rank 0 does. A collective.

    LaunchError on every rank if the file cannot be written.
    """
    tree = gather_whole(module_state(model), keep=group.is_first)
    failure = broadcast(_write(tree, path) if group.is_first else None, group.world_size, group.device)
    if failure is not None:
        raise LaunchError(
            f"the model cannot be written to {path}: {failure}", "rt.save_model(path that can be written)"
        )


@at_files()
def _write(tree: object, path: Path) -> str | None:
    """Returns what prevented it, or None."""
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(map_tensors(tree, lambda _, tensor: tensor.detach().cpu()), file)
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            return (error.strerror or str(error)).lower()
        if not is_failed_write(error):
            raise
        return f"torch could not write all of it ({error})"
    return None
