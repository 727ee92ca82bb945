"""One device, tried by a process of its own: `python -m hpcddp.checks.device`. The only check that imports torch.

It answers each line of JSON on its input by one on its output; whoever started it kills it where it does not answer in
time. Its first line says which versions there are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SIZE, _BYTES, _TIMES_S = 8192, 1 << 28, 0.5
_SMALL, _PINGS = 1, 20


def find_versions() -> dict[str, Any]:
    """Versions, and how many devices torch sees."""
    cuda = torch.version.cuda or torch.version.hip
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None  # type: ignore[no-untyped-call]
    versions = {"Python": sys.version.split()[0], "torch": torch.__version__, "CUDA": cuda, "NCCL": nccl}
    return {"versions": {k: v for k, v in versions.items() if v}, "devices": torch.cuda.device_count()}


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


def _rate(work: Any) -> float:
    """How often in a second."""
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


def exchange(rank: int, size: int, address: str, port: int, limit_s: float) -> dict[str, float]:
    """A process group of `size` devices or hosts, for as long as it takes to measure: of two, what goes from one to the
    other and back; and a sum over all, as NCCL's tests count it."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    method, limit = f"tcp://{address}:{port}", timedelta(seconds=limit_s)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=limit)
    try:
        many = torch.zeros((1 << 26) if on_gpu else (1 << 20), device=device)
        little = torch.zeros(_SMALL, device=device)
        found = {}
        if size == 2:
            for name, data, count in (("ms", little, _PINGS), ("gbps", many, 3)):
                for attempt in (1, count):  # the first opens the connections
                    began = time.perf_counter()
                    for _ in range(attempt):
                        (dist.send if rank == 0 else dist.recv)(data, 1 - rank)
                        (dist.recv if rank == 0 else dist.send)(data, 1 - rank)
                    if on_gpu:
                        torch.cuda.synchronize()
                    each = (time.perf_counter() - began) / (2 * attempt)
                found[name] = each * 1000 if name == "ms" else data.nbytes * 8e-9 / each
        for attempt in (1, 3):
            began = time.perf_counter()
            for _ in range(attempt):
                dist.all_reduce(many)
            if on_gpu:
                torch.cuda.synchronize()
            each = (time.perf_counter() - began) / attempt
        found["all_reduce_gbps"] = many.nbytes * 8e-9 * 2 * (size - 1) / size / each
        return found
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def answer_orders() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    print(json.dumps(find_versions()), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        what = {"measure": measure, "exchange": exchange}[order.pop("do")]
        try:
            answer: dict[str, Any] = dict(what(**order))  # type: ignore[operator]  # as its name says
        except Exception as error:  # whatever the driver says
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    answer_orders()
