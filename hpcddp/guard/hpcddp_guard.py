"""The first optimizer step of a rank of W without a process group of W ranks ends the rank with two lines.

W ranks that never met train W copies of one model, and end with 0: Accelerate, Lightning and HF's Trainer do where they
find no GPU, and so does a script that starts processes itself.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_NO_GROUPS = {"horovod.torch", "torch_xla", "mpi4py.MPI"}  # they sum gradients without torch's process groups
_UNUSED_AT = 64  # steps after which something must have been sent: local SGD trains some steps alone
_GUARDED = "HPCDDP_GUARDED"  # the ranks, and the run of the agent that started them
_RANK_MARKS = "HPCDDP_RANK_MARKS"  # this and the next two as in __init__.py, which is not on this path
_AGENT_RANKS = "HPCDDP_AGENT_RANKS"
_AGENT_NAMES = "HPCDDP_AGENT_NAMES"
_GPUS_PER_NODE = "HPCDDP_GPUS_PER_NODE"  # as in hpcddp/ranks/device.py
_KINDS = ("accelerator", "cuda", "xpu")  # torch's names for what can train in place of a CPU; the first is 2.6's
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ON_CPUS = "gpus_per_node: 0 in the job file, or leave --gpus-per-node out of the script's exec line"
HINT_NO_GPU = f"to train on CPUs: {_ON_CPUS}"


def check(world_size: int, step: int) -> None:
    """End this process with status 4 unless it has a process group of `world_size` ranks, which is used by and by."""
    alone = _how_alone(world_size, step)
    if not alone:
        return
    what = f"rank {os.environ.get('RANK', '?')} of {world_size} takes an optimizer step with {alone}"
    hint = "init_process_group() and DDP before training (Accelerate and HF Trainer on CPUs: ACCELERATE_USE_CPU=true);"
    _end(f"{what}: each rank trains a whole copy of its own", hint)


def refuse_own_agent(agent: str, ranks: str) -> None:
    """End this rank of an agent, which is alone and is itself in each of so many ranks."""
    what = f"a rank takes an optimizer step in a world of its own: each of {ranks} ranks has started a {agent}"
    hint = f"write {agent} itself behind --, not a script that calls it: then one is started per node, in one world;"
    _end(f"{what}, and trains a whole copy", hint)


def refuse_unstarted(ranks: int, step: int) -> None:
    """End this process, which the command started in place of so many ranks, unless it has joined them all."""
    if alone := _how_alone(ranks, step):
        what = f"the command was to start {ranks} ranks, and this one takes an optimizer step with {alone}"
        hint = "write the script's own command behind --, as python train.py, which is started once per rank;"
        _end(f"{what}: it trains alone", hint)


def check_gpus() -> None:
    """End this process of a job with GPUs, if torch sees none of them and the program has not asked for gloo."""
    torch, gpus = sys.modules["torch"], os.environ.get(_GPUS_PER_NODE, "")  # hpcddp.init(backend="gloo") unsets it
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")  # by the program: exec refuses it
    if not gpus or chosen or any(getattr(torch, kind).device_count() for kind in _KINDS if hasattr(torch, kind)):
        return
    what = f"the job has {gpus} GPUs on each node, and torch sees none"
    _write(
        f"rank {os.environ.get('RANK', '?')} takes an optimizer step on the CPU: {what}: {explain_no_gpu(torch)}",
        HINT_NO_GPU,
    )


def explain_no_gpu(torch: Any) -> str:
    """Why torch sees no GPU of NVIDIA's or AMD's, for people."""
    if not torch.version.cuda and not torch.version.hip:
        return f"torch {torch.__version__} is a build for CPUs"
    if torch.version.cuda and not os.path.exists("/dev/nvidiactl"):
        return f"torch {torch.__version__} is for NVIDIA's GPUs, and there is no /dev/nvidiactl here"
    if torch.version.cuda:
        import ctypes

        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "the driver's libcuda.so.1 cannot be loaded (in a container: it is started without --nv)"
    if torch.version.hip and not os.path.exists("/dev/kfd"):
        return f"torch {torch.__version__} is for AMD's GPUs, and there is no /dev/kfd here"
    masks = [f"{name}={os.environ[name]}" for name in _MASKS if name in os.environ]
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver says
        return "; ".join([*masks, *str(error).split("\n")[:1]])
    return " ".join(masks) or "the driver shows none"


def _end(what: str, hint: str) -> None:
    own = "where ranks are to train alone: independent: true in the job file, or export HPCDDP_INDEPENDENT=1"
    _write(what, f"{hint} {own}")


def _write(what: str, hint: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"hpcddp: {what}\nhint: {hint}\n")
    sys.stderr.flush()
    os._exit(4)  # an exception could be caught, and would end a thread only


def _how_alone(world_size: int, step: int) -> str:
    """What is wrong with this rank's process groups; "" for nothing, or if it cannot be told."""
    if not _NO_GROUPS.isdisjoint(sys.modules):
        return ""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if step > 1:  # it had its group at the first step, and has left it: an evaluation may train a probe
            return ""
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


class AtImport:
    """Calls a function with a module once that was imported. Without `begin` it waits for nothing."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def begin(self) -> None:
        """Wait for the module."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self._then(module)

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]  # the loader is this module's own
        return spec


def _watch_steps(check_step: Callable[[int], None]) -> None:
    """Torch's optimizers call `check_step` at the first step and at one much later."""

    def watch(module: ModuleType) -> None:
        if not hasattr(module, "register_optimizer_step_pre_hook"):  # torch 1 has no such hook
            return
        torch = module.torch
        steps = 0

        def at_step(*_: Any) -> None:  # torch goes through its hooks, and none may leave meanwhile
            nonlocal steps
            is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
            if steps >= _UNUSED_AT or is_compiling():  # a compiled step has no place for this
                return
            steps += 1
            if steps in (1, _UNUSED_AT):
                check_step(steps)

        module.register_optimizer_step_pre_hook(at_step)

    AtImport("torch.optim.optimizer", watch).begin()


def agents_words() -> tuple[str, str, str, str, str]:
    """The name of the agent that serves a store, and what its variables say here: its run, the number of agents,
    whether its store is used, how often it has started its ranks again. "" for what is not there."""
    name, *variables = os.environ.get(_AGENT_NAMES, "").split() or [""]
    run, agents, uses_store, restarts = [os.environ.get(variable, "") for variable in variables] or [""] * 4
    return name, run, agents, uses_store, restarts


def start() -> None:
    """Watch for torch's optimizers, where this is a rank of several, unless they train alone, or of a job with GPUs.

    Only the first Python of a rank: actors and probes that it starts may train alone, but no agent of one node.
    An agent is no rank, unless it trains.
    """
    is_independent = os.environ.get("HPCDDP_INDEPENDENT", "").lower() not in ("", "0", "false", "no")
    agent, run, agents, _, _ = agents_words()
    gpus = os.environ.get(_GPUS_PER_NODE, "")
    size = "1" if is_independent else os.environ.get("WORLD_SIZE", "")
    marks = os.environ.get(_RANK_MARKS, "").split()
    is_agent = bool(marks) and not any(mark in os.environ for mark in marks)
    ranks, _, run_of_rank = os.environ.get(_GUARDED, "").partition(" ")
    if ranks:
        if not is_independent and ranks != "1" and agents == "1" and run not in ("", run_of_rank):
            _watch_steps(lambda _: refuse_own_agent(agent, ranks))
    elif is_agent:
        planned = os.environ.get(_AGENT_RANKS, "")
        if not is_independent and planned.isdigit() and int(planned) > 1:  # an agent never steps, but some train alone
            _watch_steps(lambda step: refuse_unstarted(int(planned), step))
    elif size.isdigit() and (int(size) > 1 or gpus):
        os.environ[_GUARDED] = f"{size} {run}"
        _watch_steps(lambda step: check_rank(int(size), step))


def check_rank(world_size: int, step: int) -> None:
    """The checks of a rank at this optimizer step."""
    if step == 1:
        check_gpus()
    if world_size > 1:
        check(world_size, step)
