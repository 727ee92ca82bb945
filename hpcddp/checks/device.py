"""One device, tried by a process of its own: `python -m hpcddp.checks.device SOCKET`. It alone imports torch.

The process that starts it (`process.Worker`) sends orders, and kills it where it does not answer in time. It sends its
versions first.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it without saying so

from hpcddp import __version__
from hpcddp.checks.process import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE, _BYTES, _TIMES_S = 8192, 1 << 28, 0.5
_PINGS, _TRIES = 20, 3
_stores: list[TCPStore] = []


def find_versions() -> dict[str, Any]:
    cuda = torch.version.cuda or torch.version.hip
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None  # type: ignore[no-untyped-call]
    versions = {"Python": sys.version.split()[0], "torch": torch.__version__, "CUDA": cuda, "NCCL": nccl}
    versions["hpcddp"] = __version__
    return {"versions": {k: v for k, v in versions.items() if v}}


def measure() -> dict[str, float]:
    """TFLOPS of a matrix product in 16 bits, and GB/s that a copy in the device's memory moves, each for half a
    second."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    left = torch.randn(_SIZE, _SIZE, device="cuda", dtype=dtype)
    source = torch.empty(_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    product = torch.empty_like(left)
    multiply = _rate(lambda: torch.mm(left, left, out=product))
    if not torch.isfinite(product).all():
        return {"error": "its matrix product is not finite"}  # type: ignore[dict-item]  # the only text
    return {"tflops": multiply * 2e-12 * _SIZE**3, "copy_gbs": _rate(lambda: target.copy_(source)) * 2e-9 * _BYTES}


def _rate(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < _TIMES_S:
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        count += 5
    return count / (time.perf_counter() - began)


def open_store(limit_s: float) -> dict[str, int]:
    """Rank 0 of the next exchange: let the others find each other here. The answer: the port."""
    limit = timedelta(seconds=limit_s)
    _stores[:] = [TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)]
    return {"port": _stores[0].port}


def exchange(
    rank: int, size: int, address: str, port: int, backend: str, limit_s: float, is_sum: bool
) -> dict[str, float]:
    """A process group of one device each of several hosts: a sum over all, as NCCL's tests count it; or of two the Gb/s
    and milliseconds from one to the other. The best of some tries each, after one that opens the connections."""
    limit, on_gpu = timedelta(seconds=limit_s), backend == "nccl"
    store = _stores.pop() if rank == 0 else TCPStore(address, port, None, False, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")

    def best_s(work: Callable[[torch.Tensor], object], data: torch.Tensor, tries: int) -> float:
        times = []
        for _ in range(1 + tries):
            began = time.perf_counter()
            work(data)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def go_and_return(data: torch.Tensor) -> None:
        for at in (0, 1):
            (dist.send if rank == at else dist.recv)(data, 1 - rank)

    try:
        many = torch.zeros((1 << 26) if on_gpu else (1 << 18) if is_sum else (1 << 16), device=device)
        if is_sum:
            moved = many.nbytes * 2 * (size - 1) / size
            return {"all_reduce_gbps": moved * 8e-9 / best_s(dist.all_reduce, many, _TRIES)}
        ms = best_s(go_and_return, torch.zeros(1, device=device), _PINGS) * 1000 / 2
        return {"ms": ms, "gbps": many.nbytes * 8e-9 * 2 / best_s(go_and_return, many, _TRIES)}
    finally:
        dist.destroy_process_group()


def answer_orders(peer: Peer) -> None:
    """Answer until the connection ends, which is an EOFError."""
    torch.set_num_threads(1)
    peer.send(find_versions())
    while True:
        order = peer.receive()
        what = {"measure": measure, "open_store": open_store, "exchange": exchange}[order.pop("do")]
        try:
            answer: dict[str, Any] = dict(what(**order))  # type: ignore[operator]  # as its name says
        except Exception as error:  # whatever the driver says
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:300]}
        peer.send(answer)


if __name__ == "__main__":
    with suppress(EOFError):
        answer_orders(Peer(socket.socket(fileno=int(sys.argv[1]))))
