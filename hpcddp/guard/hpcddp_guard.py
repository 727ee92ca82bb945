"""The first optimizer step of a rank of W without a process group of W ranks ends the rank with two lines.

W ranks that never met train W copies of one model, and end with 0: Accelerate, Lightning and HF's Trainer do where they
find no GPU, and so does a script that starts processes itself. And a rank that has done its work does not end with
SIGABRT: see `let_gloo_end`.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_WATCHED = "torch.optim.optimizer"
_NO_GROUPS = {"horovod.torch", "torch_xla", "mpi4py.MPI"}  # they sum gradients without torch's process groups
_UNUSED_AT = 64  # steps after which something must have been sent: local SGD trains some steps alone
_GLOO_THREADS = "pt_gloo_runloop"  # what torch calls them, by 2.14 at the latest; 2.6 gave them no name
_GLOO_TIMEOUT_S = 5.0
_GUARDED = "HPCDDP_GUARDED"  # the ranks, and the run of the agent that started them
_ELASTIC_RUN = "TORCHELASTIC_RUN_ID"  # each agent gives its ranks one
_RANK_MARKS = "HPCDDP_RANK_MARKS"  # as in __init__.py, which is not on this path


def check(world_size: int, step: int) -> None:
    """End this process with status 4 unless it has a process group of `world_size` ranks, which is used by and by."""
    alone = _how_alone(world_size, step)
    if not alone:
        return
    what = f"rank {os.environ.get('RANK', '?')} of {world_size} takes an optimizer step with {alone}"
    hint = "init_process_group() and DDP before training (Accelerate and HF Trainer on CPUs: ACCELERATE_USE_CPU=true);"
    _end(f"{what}: each rank trains a whole copy of its own", hint)


def refuse_own_agent(ranks: str) -> None:
    """End this rank of an agent, which is alone and is itself in each of so many ranks."""
    what = f"a rank takes an optimizer step in a world of its own: each of {ranks} ranks has started a torchrun"
    hint = "write torchrun itself behind --, not a script that calls it: then one is started per node, in one world;"
    _end(f"{what}, and trains a whole copy", hint)


def _end(what: str, hint: str) -> None:
    own = "where ranks are to train alone: independent: true in the job file, or export HPCDDP_INDEPENDENT=1"
    sys.stdout.flush()
    sys.stderr.write(f"hpcddp: {what}\nhint: {hint} {own}\n")
    sys.stderr.flush()
    os._exit(4)  # an exception could be caught, and would end a thread only


def _how_alone(world_size: int, step: int) -> str:
    """What is wrong with this rank's process groups; "" for nothing, or if it cannot be told."""
    if not _NO_GROUPS.isdisjoint(sys.modules):
        return ""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        rpc = getattr(sys.modules.get("torch.distributed.rpc"), "_is_current_rpc_agent_set", bool)
        return "" if rpc() else "no process group"
    size = distributed.get_world_size()
    if size != world_size:
        return f"a process group of {size}"
    if step == 1:
        return ""
    try:  # torch's own count of a group's collectives, which not every backend has
        groups = distributed.distributed_c10d._world.pg_map  # the list has no public name
        # nor has the count; hpcddp.integrations has a group of its own, over which nothing is trained
        used = any(g._get_sequence_number_for_group() for g in groups if getattr(g, "group_desc", "") != "hpcddp")
    except (AttributeError, RuntimeError):
        return ""
    return "" if used else f"a process group in which nothing was sent in {step} steps"


class _Watch:
    """Finds torch's optimizers when they are imported, and asks them to call `check_step` at the first step."""

    def __init__(self, check_step: Callable[[int], None]) -> None:
        self._check_step = check_step
        self._steps = 0

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                load(module)
                self._watch(module)

            spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]  # the loader is this module's own
        return spec

    def _watch(self, module: ModuleType) -> None:
        if not hasattr(module, "register_optimizer_step_pre_hook"):  # torch 1 has no such hook
            return
        torch = module.torch

        def at_step(*_: Any) -> None:  # torch goes through its hooks, and none may leave meanwhile
            is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
            if self._steps >= _UNUSED_AT or is_compiling():  # a compiled step has no place for this
                return
            self._steps += 1
            if self._steps in (1, _UNUSED_AT):
                self._check_step(self._steps)

        module.register_optimizer_step_pre_hook(at_step)


def let_gloo_end() -> None:
    """Wait, before Python ends, until no thread of gloo's runs; for 5 s at most.

    Such a thread gives a collective's tensors back after it has told the program that the collective is done. One that
    comes to this while Python ends is stopped inside of C++: "terminate called without an active exception", SIGABRT.
    """
    if "torch.distributed" not in sys.modules:
        return
    deadline = time.monotonic() + _GLOO_TIMEOUT_S
    rounds_asleep = 0  # several, for a thread that waits for Python's lock sleeps too, until this one gives it away
    while rounds_asleep < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        rounds_asleep = 0 if "R" in _states() else rounds_asleep + 1


def _states() -> list[str]:
    """Of gloo's threads, as the kernel writes them: R if it runs. Where they have no name, of all but this one."""
    named, others = [], []
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:  # no Linux
        return []
    for number in numbers:
        try:
            with open(f"/proc/self/task/{number}/stat", encoding="utf-8") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:  # it has ended
            continue
        if name == _GLOO_THREADS:
            named.append(rest[0])
        elif int(number) != os.getpid():  # Python ends in the first thread
            others.append(rest[0])
    return named or others


def start() -> None:
    """Watch for torch's optimizers, where this is a rank of several and nobody said that they train alone.

    Only the first Python of a rank: actors and probes that it starts may train alone, but no torchrun of one node. An
    agent is no rank.
    """
    atexit.register(let_gloo_end)  # the first to be registered is called last
    if os.environ.get("HPCDDP_INDEPENDENT", "").lower() not in ("", "0", "false", "no"):
        return
    size, run = os.environ.get("WORLD_SIZE", ""), os.environ.get(_ELASTIC_RUN, "")
    marks = os.environ.get(_RANK_MARKS, "").split()
    is_agent = bool(marks) and not any(mark in os.environ for mark in marks)
    ranks, _, run_of_rank = os.environ.get(_GUARDED, "").partition(" ")
    if ranks:
        if os.environ.get("GROUP_WORLD_SIZE") == "1" and run not in ("", run_of_rank):
            sys.meta_path.insert(0, _Watch(lambda _: refuse_own_agent(ranks)))
    elif not is_agent and size.isdigit() and int(size) > 1:
        os.environ[_GUARDED] = f"{size} {run}"
        sys.meta_path.insert(0, _Watch(lambda step: check(int(size), step)))
