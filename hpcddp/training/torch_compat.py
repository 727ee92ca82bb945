"""All that is private to torch or depends on its version. Each has a test, run with the supported versions.

Two things are elsewhere: what `guard/` asks torch about its process groups and mends in it, and the tensors without
numbers on which `advise/measure.py` runs a model. Their tests run with these.
"""

from __future__ import annotations

import inspect
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them without saying so
    DistNetworkError,
    HashStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

__all__ = ["HashStore", "NormWithStatistics", "PrefixStore", "Store", "TCPStore", "rendezvous"]

#: The class of all layers that may keep running statistics: BatchNorm, SyncBatchNorm, InstanceNorm. Torch has no public
#: name for it.
NormWithStatistics = _NormBase

# torch has renamed the option: 2.14 has the new name, 2.6 the old one
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
#: DDP's option that switches the broadcast of buffers at each forward pass off.
NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that was given to torch.compile, or the model itself. Torch has no public name for it."""
    original = getattr(model, "_orig_mod", model)
    return original if isinstance(original, nn.Module) else model


def default_store() -> Store:
    """The store of the default process group, to exchange something without a collective."""
    return _get_default_store()


def drop_iterator(loader: DataLoader[Any]) -> None:
    """Let go of the iterator that a DataLoader with persistent workers keeps: the next one is made anew."""
    loader._iterator = None


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a learning rate scheduler was made for it. It wraps the optimizer's `step` to see it called."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def note_steps(optimizer: Optimizer) -> None:
    """The optimizer has stepped, in an attempt before: its scheduler does not warn if it steps before it does again."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch sets it in the step that it wraps


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The `step` of a class without what torch puts around it, which calls the hooks that look at a script's steps."""
    step: Any = kind.step
    bare: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


def has_averaged(model: DistributedDataParallel) -> bool:
    """Whether all gradients of the passes so far were averaged. Not so if a parameter has none, which DDP waits for."""
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch does not annotate it
    except RuntimeError:
        return False
    return True


#: Whether `init_process_group(device_id=…)` works: it is faulty in torch 2.6.0 to 2.7.0 (pytorch#153960).
TAKES_DEVICE_ID = torch.__version__ >= (2, 7, 1)  # type: ignore[operator]  # a TorchVersion, which torch types as str


def host_tcp_store(port: int, timeout: timedelta) -> TCPStore:
    """A store on this host that waits for nobody; port 0: any. DistNetworkError if it cannot listen on the port."""
    try:
        return TCPStore("localhost", port, None, True, timeout, wait_for_workers=False)
    except DistNetworkError:
        raise
    except RuntimeError as error:  # torch 2.6, for a port that is in use
        raise DistNetworkError(str(error)) from error


def second_connection(store: Store) -> Store:
    """The same store by a connection of its own, which no call of another thread holds. torch 2.6 gives the first."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def greet_store(connection: socket.socket) -> None:
    """Say what a client of TCPStore says first. OSError if the answer does not come in the socket's timeout, or is none
    of a store, which sends the ping's number back: TCPStore itself may wait for another program without any limit."""
    validate, magic, ping, number = 0, 0x3C85F7CE, 13, os.getpid()  # of c10d/TCPStoreBackend.hpp
    connection.sendall(struct.pack("=BIBI", validate, magic, ping, number))
    if connection.recv(4) != struct.pack("=I", number):
        raise ConnectionError("what listens there is no store")


def all_gather_flat(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Put the ranks' `part` (n,) one after the other into `whole` (ranks * n,). torch 2.14 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def destroy_process_group() -> None:
    """`torch.distributed.destroy_process_group`, which with torch 2.6 may hang: it joins gloo's threads while it holds
    the interpreter's lock, which they want for the last tensor of a collective. The backends' own end does not hold it.
    """
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    dist.destroy_process_group()
    del groups  # the last reference to each backend is now in the list
    backends.clear()


def abort_process_group() -> None:
    """Destroy the default group after an error, without waiting for NCCL kernels that cannot end."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.get_backend() == "nccl":
        abort()
    else:
        destroy_process_group()


def release_wrapper(model: DistributedDataParallel) -> None:
    """Let a DDP object give up its process group; its `module` stays usable.

    One that is held until Python ends takes the group's threads with it there, which torch 2.6 waits for with the lock
    that they need.
    """
    for name in ("reducer", "logger", "process_group"):
        model.__dict__.pop(name, None)


def add_to_each(sums: list[Tensor], values: list[Tensor] | float) -> None:
    """Add to each tensor of a list, in place: a tensor of its own, or one number."""
    torch._foreach_add_(sums, values)


def largest_magnitudes(tensors: list[Tensor]) -> Tensor:
    """(n,) float64: of each tensor the largest absolute value."""
    return torch.stack(torch._foreach_norm(tensors, torch.inf)).double()


def end_of_saving(answer: Any) -> Future[Any]:
    """The future that is done when all is written, from what `async_save` returns: itself up to torch 2.8."""
    return answer if isinstance(answer, Future) else answer.upload_completion


def is_failed_write(error: BaseException) -> bool:
    """Whether `torch.save` could not write to its file, as on a full disk. It may end with an error of its own then, of
    this file of torch's source, in place of the OSError."""
    return isinstance(error, RuntimeError) and "inline_container.cc" in str(error)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, itself and no view; any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


GradientVersion = tuple[Tensor | None, int]  # a gradient, and how often it was changed in place


def gradient_version(parameter: Tensor) -> GradientVersion:
    """The gradient that a parameter has now: a change of it, or another one, is not equal to it."""
    gradient = parameter.grad
    if gradient is None:
        return None, 0
    gradient = local_part(gradient)
    return gradient, gradient._version


def is_as_before(parameter: Tensor, before: GradientVersion) -> bool:
    """Whether it has this gradient still, unchanged."""
    now, version = gradient_version(parameter)
    return now is before[0] and version == before[1]
