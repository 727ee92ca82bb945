"""Starts groups of real ranks quickly: torch is imported once, and each rank is a fork of this process.

Run as a program by `run_ranks`. A request is one line of JSON on stdin: the function ("module:name"), the number of
ranks, its argument, more environment. The answer is one line: each rank's exit status and output.

`run_python` asks for one process that runs a script and its arguments as a new Python does, in this environment alone.
`start_python` is answered at once, with its process id; {"ended": process id} waits for its exit status.

At a program's end Python and C++ take torch apart, which takes longer than all that a short rank does. In a quick test
rank 0 does that where a function of its module runs for the first time: aborts in destructors must show, if not each
time. The others end behind their last `atexit` function.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
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

import encodings.idna  # noqa: F401  # a look-up of an address does

import hpcddp.api
import hpcddp.ranks.launch
import hpcddp.runs.start
import hpcddp.training.opening

_is_interactive = hpcddp.runs.start.is_interactive
hpcddp.runs.start.is_interactive = lambda: True  # as in a notebook: a rank may play several attempts of a run

PATIENCE_S = 600  # a limit for hangs: a busy machine must not reach it
# The end of input would not do: loader processes of the tests may hold the other end of the pipe.
END = "end\n"


def _become_rank(request: dict, whole_end: bool, rank: int, output: Path) -> None:
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
    module, name = request["function"].split(":")
    _run(
        lambda: getattr(importlib.import_module(module), name)(request["argument"]),
        traceback.print_exc,
        whole_end,
    )


def _run(body: Callable[[], object], report: Callable[[], object], whole_end: bool) -> None:
    status = 0
    if not whole_end:

        @atexit.register  # what comes first here is called last
        def _end_here() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    try:
        try:
            body()
        except SystemExit:
            raise
        except BaseException:  # torch's CheckpointException is no Exception
            status = 1  # also where a limit of the test's cuts the report off
            report()  # which may end the process with another status
            sys.exit(1)
        sys.exit(0)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def _become_python(request: dict, outputs: list[Path]) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    hpcddp.runs.start.is_interactive = _is_interactive
    sys.argv = request["words"]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = request["folder"]
    warnings.filterwarnings("default", category=UserWarning)
    torch.set_num_threads(1)
    body = functools.partial(runpy.run_path, sys.argv[0], run_name="__main__")
    _run(body, lambda: sys.excepthook(*sys.exc_info()), whole_end=False)


def serve() -> None:
    # A rank's collector leaves alone what came from here, also at the end: else that is two thirds of its time.
    gc.collect()
    gc.freeze()
    ended = set()  # modules
    while (line := sys.stdin.readline()) not in ("", END):
        request = json.loads(line)
        if "ended" in request:
            print(json.dumps(_wait({0: request["ended"]})), flush=True)
            continue
        folder = Path(request["outputs"])
        if "words" in request:
            outputs = [folder / "stdout", folder / "stderr"]
            bodies = [functools.partial(_become_python, request, outputs)]
        else:
            module = request["function"].partition(":")[0]
            is_first = module not in ended
            ended.add(module)
            outputs = [folder / f"rank-{rank}.out" for rank in range(request["world_size"])]
            bodies = [
                functools.partial(_become_rank, request, request["whole_end"] or (is_first and rank == 0), rank, output)
                for rank, output in enumerate(outputs)
            ]
        children = {}
        for rank, body in enumerate(bodies):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                body()
            children[rank] = pid
        if request.get("at_once"):
            print(json.dumps(pid), flush=True)
            continue
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
