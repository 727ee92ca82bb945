"""All that is private to torch or depends on its version. Each has a test, run with the supported versions.

Two things are elsewhere: what `guard/` asks torch about its process groups and mends in it, and the tensors without
numbers on which `advise/measure.py` runs a model. Their tests run with these.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
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


def is_compiled(model: nn.Module) -> bool:
    """Whether it, or a layer of it, was given to torch.compile or has called its `compile`."""
    return any(
        uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


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


def takes_device_id(version: str = torch.__version__) -> bool:
    """Whether `init_process_group(device_id=…)` works; it is faulty in 2.6.0 <= torch < 2.7.1 (pytorch#153960)."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    return not (2, 6, 0) <= numbers < (2, 7, 1)


def host_tcp_store(port: int, world_size: int, timeout: timedelta, listener: socket.socket | None = None) -> TCPStore:
    """A store on this host that waits for nobody. DistNetworkError if it cannot listen on the port.

    With `listener`, a socket that listens on this port already, the store takes that over; a torch that cannot do so
    gets the port when the socket is closed.
    """
    # a C++ function, whose docstring has the signature
    if listener is None or "master_listen_fd" not in (TCPStore.__init__.__doc__ or ""):
        if listener is not None:
            listener.close()
        return _serve(port, world_size, timeout)
    with listener:
        try:
            return _serve(port, world_size, timeout, master_listen_fd=os.dup(listener.fileno()))
        except NotImplementedError:  # torch 2.6: only the older of its two servers can
            return _serve(port, world_size, timeout, master_listen_fd=os.dup(listener.fileno()), use_libuv=False)


def _serve(port: int, world_size: int, timeout: timedelta, **options: Any) -> TCPStore:
    try:
        return TCPStore("localhost", port, world_size, True, timeout, wait_for_workers=False, **options)
    except (DistNetworkError, NotImplementedError):
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


def release_wrappers() -> None:
    """Every DDP object gives up its process group, also one that a variable still holds; its `module` stays usable.

    One that is held until Python ends takes the group's threads with it there, which torch 2.6 waits for with the lock
    that they need.
    """
    # Torch keeps no list of them, and a list of those that hpcddp wraps would miss the user's own (`hpcddp.init`) and
    # the deep copies that AveragedModel makes. So the garbage collector says it, once, when the group ends.
    for holder in gc.get_referrers(*dist.distributed_c10d._world.pg_map):
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        if "reducer" in attributes:
            for name in ("reducer", "logger", "process_group"):
                attributes.pop(name, None)


def add_to_each(sums: list[Tensor], values: list[Tensor] | float) -> None:
    """Add to each tensor of a list, in place: a tensor of its own, or one number."""
    torch._foreach_add_(sums, values)


def largest_magnitudes(tensors: list[Tensor]) -> Tensor:
    """(n,) float64: of each tensor the largest absolute value."""
    return torch.stack(torch._foreach_norm(tensors, torch.inf)).double()


def quiet_redistribution() -> None:
    """Silence each rank's lines about the two collectives that a norm, or a gathered tensor, takes on a mesh of two
    dimensions."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def copy_layer_versions(state: dict[str, Any], copy: dict[str, Any]) -> None:
    """Give a copy of `module.state_dict()` the version of each layer's state, which torch keeps in an attribute.

    `load_state_dict` converts the state of an older layer by them.
    """
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata  # type: ignore[attr-defined]  # an attribute that torch adds to the dict


def end_of_saving(answer: Any) -> Future[Any]:
    """The future that is done when all is written, from what `async_save` returns: itself up to torch 2.8."""
    return answer if isinstance(answer, Future) else answer.upload_completion


def is_failed_write(error: BaseException) -> bool:
    """Whether `torch.save` could not write to its file, as on a full disk. It may end with an error of its own then, of
    this file of torch's source, in place of the OSError."""
    return isinstance(error, RuntimeError) and "inline_container.cc" in str(error)


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a checkpoint of torch.distributed.checkpoint, also of one that a newer torch wrote.

    Since 2.15 a tensor's properties end with its strides, which an older torch does not take. The tensors' own files
    have them too.
    """
    from torch.distributed.checkpoint.metadata import TensorProperties

    known = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]  # torch does not annotate it

    class Properties(TensorProperties):
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            super().__setstate__(state[:known])  # type: ignore[no-untyped-call]  # torch does not annotate it

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            return Properties if found is TensorProperties else found

    with path.open("rb") as file:
        return Unpickler(file).load()


# What is private to torch about gradients.


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks have in parts (a DTensor), itself and no view; else the tensor."""
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


# What is private to torch about tensors that ranks have in parts (DTensors).


@contextmanager
def shard_assignments() -> Iterator[None]:
    """Meanwhile `p.data = numbers` changes the numbers of a parameter in parts. Torch would lose them without an error:
    the part lies in another tensor that the parameter only refers to."""
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    if "data" in vars(kind):  # of a runtime around this one
        yield
        return
    data: Any = vars(torch._C.TensorBase)["data"]

    def assign(tensor: Tensor, numbers: Tensor) -> None:
        if not isinstance(numbers, DTensor) or (numbers.shape, numbers.dtype) != (tensor.shape, tensor.dtype):
            data.__set__(tensor, numbers)
            return
        data.__get__(tensor).copy_(numbers.detach())

    kind.data = property(data.__get__, assign)
    try:
        yield
    finally:
        del kind.data
