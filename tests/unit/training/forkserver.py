"""Starts groups of real ranks quickly: torch is imported once, and each rank is a fork of this process.

Run as a program by `run_ranks`. A request is one line of JSON on stdin: the function ("module:name"), the number of
ranks, its argument, more environment. The answer is one line: each rank's exit status and output.

At a program's end C++ takes torch apart, which takes longer than all that a short rank does. A rank of a quick test
does that only where its function runs for the first time: aborts in C++ destructors must show, if not each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path

sys.modules["triton"] = None  # nothing here compiles for GPUs, and it complains at a rank's end of what is frozen below

import torch
import torch._dynamo  # every optimizer imports it, which takes 1.5 s: once here, before the first fork
import torch.distributed.checkpoint.state_dict_saver  # the same for models in parts and their checkpoints
import torch.distributed.fsdp
import torch.distributed.tensor

with contextlib.suppress(
    ImportError
):  # where only the parts that depend on torch's version are tested, without torchvision
    import hpcddp.trainer  # the same, with torchvision

import hpcddp.runs.start

hpcddp.runs.start.is_interactive = lambda: True  # as in a notebook: a rank may play several attempts of a run

PATIENCE_S = 600  # a limit for hangs: a busy machine must not reach it
# The end of input would not do: loader processes of the tests may hold the other end of the pipe.
END = "end\n"


def _become_rank(request: dict, rank: int, output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    size = request["world_size"]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"], "OMP_NUM_THREADS": 1}
    special = request["env"] | request["env_of_rank"].get(str(rank), {})
    for name, value in (place | address | special).items():
        os.environ[name] = str(value)
        if value is None:
            del os.environ[name]
    torch.set_num_threads(1)
    if not request["whole_end"]:
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # called first of all, when Python has ended, with the status
    module, name = request["function"].split(":")
    try:
        getattr(importlib.import_module(module), name)(request["argument"])
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def serve() -> None:
    # A rank's collector leaves alone what came from here, also at the end: else that is two thirds of its time.
    gc.collect()
    gc.freeze()
    ended = set()  # functions
    while (line := sys.stdin.readline()) not in ("", END):
        request = json.loads(line)
        outputs = [Path(request["folder"]) / f"rank-{rank}.out" for rank in range(request["world_size"])]
        request["whole_end"] |= request["function"] not in ended
        ended.add(request["function"])
        children = {}
        for rank, output in enumerate(outputs):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _become_rank(request, rank, output)
                sys.exit(0)  # a normal end of the interpreter
            children[rank] = pid
        answer = _wait(children)
        print(json.dumps({"statuses": answer, "outputs": [path.read_text() for path in outputs]}), flush=True)


def _wait(children: dict[int, int]) -> list[int | None]:
    """Exit statuses by rank, negative for a signal; None for a rank that hangs, and had to be killed."""
    statuses: dict[int, int | None] = {}
    deadline = time.monotonic() + PATIENCE_S
    for rank, pid in children.items():
        ended = os.pidfd_open(pid)
        if not select.select([ended], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            statuses[rank] = None
        _, status = os.waitpid(pid, 0)
        statuses.setdefault(rank, os.waitstatus_to_exitcode(status))
        os.close(ended)
    return [statuses[rank] for rank in sorted(statuses)]


if __name__ == "__main__":
    serve()
