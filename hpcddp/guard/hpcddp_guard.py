"""Finds ranks that train alone: warns at the first optimizer step outside of a process group of all ranks, and ends the
rank at its 50th. A rank that sends nothing in its group is warned at its 64th.

Ranks that never met train copies of one model and exit with 0: Accelerate, Lightning and HF's Trainer do where they
find no GPU, and so does a script that starts processes itself.

The exit of a rank waits for gloo's threads: torch would abort by chance.
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

_NO_GROUPS = {"horovod.torch", "torch_xla", "mpi4py.MPI", "ray"}  # they join ranks without torch's process groups
_ENDS_AT = 50  # steps of a rank that is alone: a probe before init_process_group() makes fewer
_UNUSED_AT = 64  # steps after which something should have been sent: local SGD trains some steps alone
#: The ranks, the run of the agent that started them, and the rank's first process with torch.
_GUARDED = "HPCDDP_GUARDED"
_RANK_MARKS = "HPCDDP_RANK_MARKS"  # this and the next two as in __init__.py, which is not on this path
_AGENT_RANKS = "HPCDDP_AGENT_RANKS"
_AGENT_NAMES = "HPCDDP_AGENT_NAMES"
_GPUS_PER_NODE = "HPCDDP_GPUS_PER_NODE"  # as in hpcddp/ranks/device.py
_HEARTBEAT = "HPCDDP_HEARTBEAT"  # as in hpcddp/runs/heartbeat.py
_GLOO_THREADS = "pt_gloo_runloop"  # what torch calls them, by 2.14 at the latest; 2.6 gave them no name
_GLOO_TIMEOUT_S = 5.0
_KINDS = ("accelerator", "cuda", "xpu")  # torch's names for what can train in place of a CPU; the first is 2.6's
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
HINT_NO_GPU = (
    "to train on CPUs, with any program: export ACCELERATE_USE_CPU=true, hpcddp launch --set"
    " env.ACCELERATE_USE_CPU=true, or gpus_per_node: 0 in the job file"
)


class Watch:
    """Looks at this process's optimizer steps, which must be part of a process group of so many `ranks`; one alone
    needs none.

    `who` takes a step and the `result` of that, in words of the message. `world`: why this rank is alone, where that is
    known before. `gpus`: those of each node, which torch has to see.
    """

    def __init__(
        self, ranks: int, who: str, result: str, hint: str, world: str = "", gpus: str = "", warns: bool = True
    ) -> None:
        self._ranks, self._who, self._result = ranks, who, result
        alone = "where ranks are to train alone: independent: true in the job file, or export HPCDDP_INDEPENDENT=1"
        self._hint = f"{hint}; {alone}"
        self._gpus, self._world, self._warns = gpus, world, warns
        self._steps = 0
        self._was_alone = False

    def step(self) -> None:
        """Count a step; warn at the first and end this process at the 50th if it is alone at both."""
        self._steps += 1
        if self._steps == 1:
            if self._gpus:
                end_without_gpus()
            alone = self.how_alone()
            self._was_alone = bool(alone)
            if alone and self._warns:
                text = self._describe(f"takes an optimizer step with {alone}")
                _write(f"{text}; it is ended at step {_ENDS_AT}", self._hint)
                atexit.register(self._report_end)
        elif self._steps == _ENDS_AT and self._was_alone:
            if alone := self.how_alone():
                _end(self._describe(f"has taken {_ENDS_AT} optimizer steps with {alone}"), self._hint)
        elif self._steps == _UNUSED_AT and self._warns and (unused := self.how_unused()):
            # local SGD, or a program of which this rank alone trains, may be right
            _write(f"{self._who} has made {self._steps} optimizer steps, and {unused}", self._hint)

    @property
    def has_stepped(self) -> bool:
        return self._steps > 0

    @property
    def is_over(self) -> bool:
        """Whether no further step is looked at."""
        return self._steps >= _UNUSED_AT

    def how_alone(self) -> str:
        """Why this rank trains alone; "" if it does not, or if that is not known."""
        if self._world:
            return self._world
        if self._ranks == 1 or not _NO_GROUPS.isdisjoint(sys.modules):
            return ""
        distributed = find_distributed()
        if distributed is None:
            rpc = getattr(sys.modules.get("torch.distributed.rpc"), "_is_current_rpc_agent_set", bool)
            return "" if rpc() else "no process group"
        size = distributed.get_world_size()
        return "" if size == self._ranks else f"a process group of {size}"

    def how_unused(self) -> str:
        """Why the process group is of no use to this rank; "" if it is used, or if that is not known. A rank that has
        left its group may train a probe for an evaluation."""
        distributed = find_distributed()
        if distributed is None or self._world or self._ranks == 1 or not _NO_GROUPS.isdisjoint(sys.modules):
            return ""
        if alone := self.how_alone():
            return f"has {alone}"
        try:  # torch's own count of a group's collectives, which not every backend has
            groups = distributed.distributed_c10d._world.pg_map  # the list has no public name
            # nor has the count; hpcddp.integrations has a group of its own, over which nothing is trained
            used = any(g._get_sequence_number_for_group() for g in groups if getattr(g, "group_desc", "") != "hpcddp")
        except (AttributeError, RuntimeError):
            return ""
        return "" if used else "nothing was sent in its process group"

    def _describe(self, what: str) -> str:
        return f"{self._who} {what}: {self._result}"

    def _report_end(self) -> None:
        if self._steps < _ENDS_AT and (alone := self.how_alone()):
            _write(self._describe(f"ends after {self._steps} optimizer steps with {alone}"), self._hint)


def end_without_gpus() -> None:
    """End this process of a job with GPUs, if torch sees none of them and the program has not asked for gloo."""
    torch, gpus = sys.modules["torch"], os.environ.get(_GPUS_PER_NODE, "")  # hpcddp.init(backend="gloo") unsets it
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")  # by the program: exec refuses it
    if not gpus or chosen or any(getattr(torch, kind).device_count() for kind in _KINDS if hasattr(torch, kind)):
        return
    what = f"the job has {gpus} GPUs on each node, and torch sees none"
    rank = os.environ.get("RANK", "?")
    _end(f"rank {rank} takes an optimizer step on the CPU: {what}: {explain_no_gpu(torch)}", HINT_NO_GPU)


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
    sys.stdout.flush()
    _write(what, hint)
    os._exit(4)  # an exception could be caught, and would end a thread only


def _write(what: str, hint: str) -> None:
    sys.stderr.write(f"hpcddp: {what}\nhint: {hint}\n")
    sys.stderr.flush()


def find_distributed() -> Any:
    """torch.distributed, if this process has a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None


class AtImport:
    """Calls a function with a module as soon as that is imported: from `begin` on, or at once if it was before."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def begin(self) -> None:
        """Wait for the module."""
        if self.name in sys.modules:
            self._then(sys.modules[self.name])
        else:
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


def _watch_steps(watch: Watch, marks: str = "") -> None:
    """Torch's optimizers call `watch`. `marks`: so that what this process starts from then on is no rank."""

    def begin(module: ModuleType) -> None:
        if marks:
            os.environ[_GUARDED] = marks
        if not hasattr(module, "register_optimizer_step_pre_hook"):  # torch 1 has no such hook
            return
        compiler = getattr(sys.modules["torch"], "compiler", None)
        is_compiling = getattr(compiler, "is_compiling", bool)

        def at_step(*_: Any) -> None:  # torch goes through its hooks, and none may leave meanwhile
            if not watch.is_over and not is_compiling():  # a compiled step has no place for this
                watch.step()

        module.register_optimizer_step_pre_hook(at_step)

    AtImport("torch.optim.optimizer", begin).begin()


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
    """States of gloo's threads, as the kernel writes them: R if it runs. If they have no name, of all but this one."""
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
    """Watch for torch's optimizers, where this is a rank of several, unless they train alone, or of a job with GPUs.

    The rank is the first process with torch in it: not a Python that only starts another (a tracer, `conda run`), and
    no actor or probe that the rank starts, but each agent of one node. An agent is no rank, unless it trains.
    """
    atexit.register(let_gloo_end)  # the first to be registered is called last
    is_independent = os.environ.get("HPCDDP_INDEPENDENT", "").lower() not in ("", "0", "false", "no")
    agent, *variables = os.environ.get(_AGENT_NAMES, "").split() or [""]
    run, agents = [os.environ.get(variable, "") for variable in variables] or ["", ""]
    gpus, page = os.environ.get(_GPUS_PER_NODE, ""), os.environ.get(_HEARTBEAT, "")
    size = "1" if is_independent else os.environ.get("WORLD_SIZE", "")
    marks = os.environ.get(_RANK_MARKS, "").split()
    is_node_agent = bool(marks) and not any(mark in os.environ for mark in marks)
    ranks, run_of_rank, process = [*os.environ.get(_GUARDED, "").split(" "), "", ""][:3]
    if ranks and process != str(os.getpid()):  # else the rank has become another Python
        if not is_independent and ranks != "1" and agents == "1" and run not in ("", run_of_rank):
            result = f"each of {ranks} ranks has started a {agent}, and trains a whole copy"
            hint = f"write {agent} itself behind --, not a script that calls it: then one is started per node"
            _watch_steps(Watch(0, "a rank", result, hint, world="a world of its own"))
    elif is_node_agent:
        planned = os.environ.get(_AGENT_RANKS, "")
        if not is_independent and planned.isdigit() and int(planned) > 1:  # an agent never steps, but some train alone
            who = f"the command was to start {planned} ranks, and this one"
            hint = "write the script's own command behind --, as python train.py, which is started once per rank"
            _watch_steps(Watch(int(planned), who, "it trains alone", hint))
    elif size.isdigit() and (int(size) > 1 or gpus or page):
        rank = os.environ.get("RANK", "?")
        result = "each rank trains a whole copy of its own"
        warns = rank in ("0", "?")
        watch = Watch(int(size), f"rank {rank} of {size}", result, _hint(int(size)), gpus=gpus, warns=warns)
        _watch_steps(watch, marks=f"{size} {run} {os.getpid()}")
        nth = os.environ.get("LOCAL_RANK", "") if marks else "0"
        if page and nth.isdigit():  # an agent's ranks share the page
            import hpcddp_stand  # type: ignore[import-not-found]  # this folder is on the path, at Python's start

            hpcddp_stand.watch_thread(page, int(nth), lambda: watch.has_stepped, waits=int(size) > 1)


def _hint(size: int) -> str:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    each = int(local) if local.isdigit() and local != "0" and size % int(local) == 0 else size
    return (
        "with hpcddp.runtime(), or init_process_group() and DDP, before training; Accelerate and HF Trainer on CPUs:"
        f" ACCELERATE_USE_CPU=true; Lightning: Trainer(num_nodes={size // each}, devices={each}), LightningCLI:"
        " --trainer.num_nodes={nodes} --trainer.devices={local_world_size}"
    )
