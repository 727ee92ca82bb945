"""The tensors of a sharded checkpoint, written and read by all ranks with torch.distributed.checkpoint (DCP).

DCP can read a checkpoint on another number of ranks and with other shards. Each rank writes one file. `.metadata`, a
pickle, says where each tensor is; it is read only after its hash was verified. DCP removes a folder's old `.metadata`
before it writes a new one, so that no folder is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from hpcddp.errors import RequestError
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.files import INDEX
from hpcddp.training.torch_compat import end_of_saving, is_failed_write


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, which may be sharded, by name; returns when all ranks have. A collective on the default group."""
    save(dict(tensors), storage_writer=_TensorWriter(folder))


def start_writing(folder: Path, tensors: Mapping[str, Tensor], ranks: Any) -> Future[Any]:
    """Copy the tensors and return; a thread writes the copy. `ranks` is a gloo group for this purpose only."""
    return end_of_saving(async_save(dict(tensors), storage_writer=_TensorWriter(folder), process_group=ranks))


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the given tensors, sharded or not, in place. A collective on the default group.

    RequestError, on every rank, if one cannot read its part.
    """
    try:
        load(dict(tensors), storage_reader=_TensorReader(folder))
    except CheckpointException as error:
        raise RequestError(
            f"checkpoint {folder} could not be read with torch {torch.__version__}: {describe_cause(error)}",
            "if another torch wrote it, use that one: versions.json in the folder of its attempt names it",
        ) from error


class _TensorWriter(FileSystemWriter):
    """DCP's writer, with a marker on what it does between its collectives."""

    write_data = at_files()(FileSystemWriter.write_data)
    finish = at_files()(FileSystemWriter.finish)


class _TensorReader(FileSystemReader):
    read_data = at_files()(FileSystemReader.read_data)
    read_metadata = at_files()(FileSystemReader.read_metadata)


def list_files_of_rank(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"__{rank}_*")) + ([folder / INDEX] if rank == 0 else [])


def make_empty(shape: torch.Size, dtype: torch.dtype, like: Any) -> Tensor:
    """An empty tensor to read into: sharded as `like` is, or whole on the CPU if that is None."""
    return torch.empty_like(like, dtype=dtype) if like is not None else torch.empty(shape, dtype=dtype)


def is_about_files(error: BaseException) -> bool:
    """Whether writing failed, on this rank or another; False when a rank is gone, and for Ctrl-C."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(cause, OSError) or is_failed_write(cause) for cause in causes)


def describe_cause(error: BaseException) -> str:
    """Describe an error of DCP without the stack traces of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
