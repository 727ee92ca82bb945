"""The ranks of short runs: a process that has torch loaded forks them, and each writes a line for what is compared.

Requests and answers of that process are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import inspect
import json
import math
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch._dynamo  # what every optimizer, and every model in parts, imports: once here, before the first fork
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset

import hpcddp.training.opening  # noqa: F401  # what every rank imports, too
from hpcddp.training.data.sampler import MicroBatch
from hpcddp.training.options import RuntimeOptions, TrialHooks, set_trial
from hpcddp.training.stopping import StopTraining
from hpcddp.uncaught import find_script_line


class Task(NamedTuple):
    """A short run."""

    ranks: int
    steps: int  # global batches after which it ends
    folder: str  # of its records
    workdir: str  # where the script runs
    by_sample: bool = False  # as `SampleDraws` and `replace_functions` say
    micro: int | None = None  # max_micro_batch; None: the script's
    reference: str = ""  # a folder with gradients to compare with; empty: none
    writes: bool = False  # those gradients
    run: str = ""  # where its run folders are; empty: it has none
    stop: int | None = None  # the global batch after which it is stopped
    global_batch: int | None = None  # None: the script's


_LARGEST = 2**62


class SampleDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Random numbers of the global batch's samples, on whichever rank they are drawn.

    What is drawn for a tensor whose first dimension is the batch's is drawn row by row, each with a seed of its sample;
    anything else is the same on all ranks. Both take one number of torch's generator, so that it is at the same place
    on all ranks after it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.rows = range(0)  # of the global batch that the loop is at; between two batches none
        self.whole_batch: set[str] = set()  # what depends on the whole batch by definition

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, count = kwargs or {}, len(self.rows)
        if torch.Tag.nondeterministic_seeded not in func.tags or not count:
            result = func(*args, **kwargs)
            if count > 1 and func is torch.ops.aten.mm.default and result.shape == (count, count):
                self.whole_batch.add("pairs")
            return result
        if func.overloadpacket is torch.ops.aten.randperm and args[0] == count:
            self.whole_batch.add("permutation")
        kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
        seed = int(torch.randint(_LARGEST, ()))
        after = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            names = [argument.name for argument in func._schema.arguments]
            if not any(_is_of_batch(name, value, count) for name, value in zip(names, args, strict=False)):
                return func(*args, **kwargs)
            rows = []
            for nth, row in enumerate(self.rows):
                torch.default_generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (row + 1)) % _LARGEST)

                def cut(value: Any, nth: int = nth) -> Any:
                    return value[nth : nth + 1] if _is_of_batch("", value, count) else value

                sizes = ([1, *value[1:]] if name == "size" else value for name, value in zip(names, args, strict=False))
                rows.append(func(*tree_map(cut, list(sizes)), **tree_map(cut, kwargs)))
            if func._schema.name.endswith("_"):
                return args[0]
            return torch.cat(rows) if isinstance(rows[0], Tensor) else tuple(map(torch.cat, zip(*rows, strict=True)))
        finally:
            torch.default_generator.set_state(after)


def _is_of_batch(name: str, value: Any, count: int) -> bool:
    shape: Any = value.shape if isinstance(value, Tensor) else value if name == "size" else ()
    return len(shape) > 0 and shape[0] == count


def replace_functions() -> None:
    """Torch's functions without dropout, autocast and statistics of a batch, before the script is loaded."""

    def same(input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:  # torch's name
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, same)
    torch.dropout = torch.feature_dropout = same
    attention: Any = functional.scaled_dot_product_attention
    norm: Any = functional.batch_norm
    arguments, begin = inspect.signature(norm), torch.autocast.__init__

    def attend(*args: Any, **named: Any) -> Any:
        if len(args) > 4:
            return attention(*args[:4], 0.0, *args[5:], **named)
        return attention(*args, **named | {"dropout_p": 0.0})

    def normalise(*args: Any, **named: Any) -> Any:
        given = arguments.bind(*args, **named)
        if given.arguments["running_mean"] is not None:
            given.arguments["training"] = False
        return norm(*given.args, **given.kwargs)

    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._enabled = False

    functional.scaled_dot_product_attention, functional.batch_norm = attend, normalise
    torch.autocast.__init__ = disabled  # type: ignore[method-assign]


class Shortened(Dataset[Any]):
    """The first samples of a data set; anything else about it is the data set's own."""

    def __init__(self, whole: Dataset[Any], samples: int) -> None:
        self._whole, self._samples = whole, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._whole[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is copied
            raise AttributeError(name)
        return getattr(self._whole, name)


_FLOOR = 1e-3  # of all gradients' norm: what is less in a tensor is rounding, or nearly
_WORST = 3  # tensors that are named


class Recorder(TrialHooks):
    """Writes a line of JSON for each thing that is compared."""

    def __init__(self, task: Task, rank: int, pipe: int) -> None:
        self._task, self._rank = task, rank
        self._file = open(f"{task.folder}/rank-{rank}.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115  # until the process ends
        self._pipe = pipe  # to the process that forked this one: a byte for each line
        self._rt: Any = None
        self._is_cut = False  # whether no rank has all of the model
        self._openings = -1
        self._taken = 0  # global batches that are over, in this process; optimizer steps, without a runtime
        self._optimizers: dict[int, Optimizer] = {}
        self._nested = 0  # steps of optimizers that are being made
        self._calls = 0  # of optimizers, in this step
        self._modes: dict[str, Any] = {}
        self._stopped = False
        self._draws = SampleDraws()  # entered where the task draws by sample

    @property
    def _step(self) -> int:
        return self._taken if self._rt is None else int(self._rt.steps)

    def write(self, kind: str, **values: Any) -> None:
        """Write a line of the record, with the step that the loop is at."""
        self._file.write(json.dumps({"kind": kind, "opening": self._openings, "step": self._step, **values}) + "\n")
        os.write(self._pipe, b".")

    def options(self, options: RuntimeOptions) -> RuntimeOptions:
        """Change the options: no sinks, a run folder of its own or none, on the CPU."""
        self._openings += 1
        task = self._task
        return replace(
            options,
            log_to=(),
            backend="gloo",
            run_dir=f"{task.run}-{self._openings}" if task.run else None,
            max_micro_batch=task.micro or options.max_micro_batch,
            global_batch=task.global_batch or options.global_batch,
        )

    def opened(self, rt: Any) -> None:
        self._rt, options = rt, rt._options
        self._is_cut = str(options.parallel) not in {"ddp", "None"}
        self.write("opened", micro=options.max_micro_batch, exact=options.exact)
        if self._task.by_sample:
            self._draws.__enter__()  # type: ignore[no-untyped-call]

    def closed(self) -> None:
        if self._task.by_sample and self._rt is not None:
            self._draws.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._task.run and sys.exc_info()[0] in {None, StopTraining}:  # a stopped script may go on with its next run
            self.end("stopped" if self._stopped else "done")

    def shorten(self, dataset: Dataset[Any], batch: int, *, drop_last: bool = False) -> Dataset[Any]:
        """Four batches, the last one as small as that of the whole data. A stream stays as it is."""
        if isinstance(dataset, IterableDataset):
            return dataset
        samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; map-style ones have it
        rest = 0 if drop_last else samples % batch
        return dataset if samples <= 4 * batch else Shortened(dataset, 3 * batch + (rest or batch))

    def key(self, key: tuple[int | str, ...], micro: MicroBatch) -> tuple[int | str, ...]:
        if self._task.by_sample:
            return ()
        return (micro.position,) if self._task.micro else key

    def part_starts(self, micro: MicroBatch) -> None:
        roots = _find_roots()
        if not self._modes:
            self.write("attributes", values=_describe_modules(roots, tensors=True))
            for _, module in _list_modules(roots):
                if self._task.by_sample and isinstance(module, nn.RNNBase):
                    module.dropout = 0.0  # which its own code in C++ does
        first = micro.position % self._rt.plan.global_batch
        self._draws.rows = range(first, first + micro.size)
        self.write("batch", total=micro.total, epoch=int(self._rt.epoch))
        if self._task.stop == int(self._rt.steps) + 1 and not self._stopped:
            self._stopped = True
            self._rt.stop("hpcddp verify")

    def backward(self, loss: Tensor, weight: float | Tensor | None, averaged_over: int) -> None:
        value, share = float(loss), float(weight or 0.0) / averaged_over
        self.write("loss", value=value, share=share * value if share else 0.0)
        modes = _describe_modules(_find_roots())
        if modes != self._modes:
            self._modes = modes
            self.write("modes", values=modes)

    def step_ends(self) -> None:
        self._calls = 0
        self._taken += 1
        self._draws.rows = range(0)
        if (int(self._rt.steps) if self._task.run else self._taken) >= self._task.steps:
            self.end("steps")

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nested += 1
        if self._nested > 1:  # a subclass that calls super().step(), or one that makes another step
            return
        self._optimizers[id(optimizer)] = optimizer
        names = _name_parameters(_find_roots())
        gradients = {
            names.get(id(parameter), f"parameter {m} of group {n}"): _make_whole(parameter.grad, parameter)
            for n, group in enumerate(optimizer.param_groups)
            for m, parameter in enumerate(group["params"])
        }
        if any(map(callable, (*args[1:], *kwargs.values()))):  # a closure: they are those of the step before
            gradients = {}
        self.write(
            "gradients",
            settings=[_list_settings(group) for group in optimizer.param_groups],
            digest=_digest(gradients.values()),
            in_parts=self._is_cut
            or any(hasattr(p, "device_mesh") for g in optimizer.param_groups for p in g["params"]),
            world=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            **self._compare(f"{self._openings}-{self._step}-{self._calls}", gradients),
        )
        self._calls += 1

    def after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._nested = max(self._nested - 1, 0)
        if self._nested:
            return
        parameters = [p for group in _optimizer.param_groups for p in group["params"]]
        self.write("weights", digest=_digest(map(_local, parameters)))
        if self._rt is None:
            self._taken, self._calls = self._taken + 1, 0
            if self._taken >= self._task.steps:
                self.end("steps")

    def _compare(self, name: str, values: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """How far these are from the reference; nothing where this is the reference, or there is none."""
        path = f"{self._task.reference}/{name}.pt"
        if self._task.writes and self._rank == 0:
            torch.save(dict(values), path)
        if self._task.writes or not os.path.exists(path):
            return {}
        return compare_tensors(values, torch.load(path))

    def end(self, how: str, error: str = "") -> NoReturn:
        """The record is over. The process waits to be ended, so that no other rank loses its connection before."""
        with suppress(Exception):
            self._compare_untrained()
        self.write("end", how=how, error=error, whole_batch=sorted(self._draws.whole_batch))
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(self._pipe, b"E")
        while True:
            time.sleep(3600)

    def _compare_untrained(self) -> None:
        """The modules that no optimizer trains: averages of weights, teachers."""
        trained = {id(p) for o in self._optimizers.values() for group in o.param_groups for p in group["params"]}
        roots = [list(root.named_parameters(_class_of(root))) for root in _find_roots()]
        others = (root for root in roots if root and not any(id(p) in trained for _, p in root))
        values = {f"{nth}: {name}": _local(p).clone() for nth, root in enumerate(others) for name, p in root}
        if self._rank == 0:
            self.write("untrained", digest=_digest(values.values()), **self._compare("untrained", values))


def compare_tensors(values: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """How far the values are from the reference: those that are farthest, relative to their norm, and the factor
    between all of them that fits best."""
    least = _FLOOR * _norm(reference.values())
    along = across = 0.0
    off: list[tuple[float, str, float, float]] = []
    for name in dict.fromkeys((*values, *reference)):
        mine, other = (None if t is None else t.detach().double() for t in (values.get(name), reference.get(name)))
        if mine is None and other is None:
            continue
        mine = torch.zeros_like(other) if mine is None else mine  # type: ignore[arg-type]  # one of them is there
        other = torch.zeros_like(mine) if other is None else other
        is_nan = bool((mine.isnan() == other.isnan()).all())
        mine, other = mine.nan_to_num(), other.nan_to_num()
        along += float((mine * other).sum())
        across += float(other.square().sum())
        norm = float(other.norm())
        away = float((mine - other).norm()) / max(norm, least, 1e-30) if is_nan else math.inf
        off.append((away, name, float(mine.norm()), norm))
    off.sort(reverse=True)
    return {"off": off[:_WORST], "factor": along / across if across else 1.0}


def _norm(tensors: Iterable[Tensor | None]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors if t is not None))


def _make_whole(tensor: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A gradient as one process has it. A collective where the parameter is in parts."""
    if hasattr(parameter, "device_mesh"):
        part: Any = torch.zeros_like(parameter) if tensor is None else tensor
        return part.full_tensor().detach().clone()  # type: ignore[no-any-return]  # of a DTensor
    return None if tensor is None else tensor.detach().to_dense()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _digest(tensors: Iterable[Tensor | None]) -> str:
    """Digest of the tensors' bits. A missing gradient counts as zeros."""
    digest = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        if tensor is not None and tensor.numel() and bool((tensor != 0).any()):
            flat = (tensor.detach() + 0).contiguous().reshape(-1)  # -0 is 0
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _list_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate, momentum and what else a group of parameters has, as numbers."""
    numbers = {name: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for name, v in group.items()}
    return {name: v for name, v in numbers.items() if isinstance(v, int | float | tuple | str | None)}


_made: dict[int, weakref.ref[nn.Module]] = {}  # the script's modules by id, in the order in which they were made


def remember_modules() -> None:
    """Remember each module that is made, copied or loaded from now on."""

    def remembering(method: Callable[..., None]) -> Callable[..., None]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            key = id(self)
            _made.setdefault(key, weakref.ref(self, lambda _: _made.pop(key, None)))
            method(self, *args, **kwargs)

        return call

    module: Any = nn.Module
    module.__init__ = remembering(module.__init__)
    module.__setstate__ = remembering(module.__setstate__)  # of a copy


def _find_roots() -> list[nn.Module]:
    """The script's modules that are in no other one."""
    modules = [module for made in _made.values() if (module := made()) is not None]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _class_of(root: nn.Module) -> str:
    return type(getattr(root, "module", root)).__name__


def _name_parameters(roots: list[nn.Module]) -> dict[int, str]:
    """Parameter -> its name in its model, with the model's class where there are several."""
    several = sum(any(True for _ in root.parameters()) for root in roots) > 1
    named = [(root, name.removeprefix("module."), p) for root in roots for name, p in root.named_parameters()]
    return {id(p): f"{_class_of(root)}.{name}" if several else name for root, name, p in reversed(named)}


def _list_modules(roots: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for root in roots:
        for name, module in root.named_modules():
            yield f"{_class_of(root)}.{name.removeprefix('module').lstrip('.')}".rstrip("."), module


def _describe_modules(roots: list[nn.Module], *, tensors: bool = False) -> dict[str, Any]:
    """The training mode of each module, and the numbers of torch's modules, such as the p of dropout. `tensors`:
    instead the tensors that modules have besides parameters and buffers."""
    found: dict[str, Any] = {}
    for name, module in _list_modules(roots):
        is_torch = type(module).__module__.startswith("torch.nn.modules")
        for key, value in vars(module).items():
            if tensors and isinstance(value, Tensor) and not key.startswith("_"):
                found[f"{name}.{key}"] = _digest([value])
            elif not tensors and (key == "training" or (is_torch and isinstance(value, int | float) and key[0] != "_")):
                found[f"{name}.{key}"] = value
    return found


def guard_files(workdir: str) -> None:
    """Let a file that is opened to be written be the trial's own: a link to one of the real working folder gives way to
    a new file, and a file elsewhere that would be emptied is refused."""
    root = os.path.realpath(workdir) + os.sep

    def protect(path: str, *, empties: bool) -> None:
        here = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if os.path.islink(here) and here.startswith(root):
            os.unlink(here)
        elif empties and not here.startswith(root) and os.path.isfile(here) and os.path.getsize(here):
            raise PermissionError(f"hpcddp verify does not let the script overwrite {here}")

    def check_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and args[2] & (os.O_WRONLY | os.O_RDWR):
            protect(os.fsdecode(args[0]), empties=bool(args[2] & os.O_TRUNC))

    save = torch.save

    def save_guarded(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):  # torch opens it in C++
            protect(os.fspath(f), empties=True)
        save(obj, f, *args, **kwargs)

    torch.save = save_guarded
    sys.addaudithook(check_event)  # the only place that sees each file which the script or a library opens


_DUMP = signal.SIGXCPU  # prints where a rank is, within a second


def _die_with_parent() -> None:
    """End this process when the command ends, also by an interrupt."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _become_rank(task: Task, rank: int, port: int, pipe: int, command: list[str]) -> NoReturn:
    os.setpgid(0, 0)
    _die_with_parent()
    os.chdir(task.workdir)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{task.folder}/rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(task.ranks))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    faulthandler.register(_DUMP, open(f"{task.folder}/rank-{rank}.stack", "w"), all_threads=False)  # noqa: SIM115
    recorder = Recorder(task, rank, pipe)
    set_trial(recorder)
    remember_modules()
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    if task.by_sample:
        replace_functions()
    guard_files(task.workdir)
    error = ""
    try:
        _run_script(command)
    except SystemExit as left:
        error = f"SystemExit: {left.code}" if left.code not in (None, 0) else ""
    except BaseException as left:
        traceback.print_exc()
        line = find_script_line(left.__traceback__)
        error = f"{line and line + ': '}{type(left).__name__}: {left}"
    recorder.end("failed" if error else "done", error)


def _run_script(command: list[str]) -> None:
    """`python train.py …` or `python -m package …`, as Python itself would."""
    sys.orig_argv = list(command)
    if command[1] == "-m":
        sys.argv = command[2:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = command[1:]
    sys.path.insert(0, os.path.dirname(os.path.realpath(command[1])))
    runpy.run_path(os.path.realpath(command[1]), run_name="__main__")


def _run_trial(task: Task, command: list[str], patience_s: float, limit_s: float) -> dict[str, Any]:
    """Fork the ranks, wait until each has ended or none gets on, end them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids: list[int] = []
    left: dict[int, int] = {}  # pipe -> rank
    for rank in range(task.ranks):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_rank(task, rank, port, writing, command)
        os.close(writing)
        pids.append(pid)
        left[reading] = rank
    pipes = list(left)
    began = last_output = time.monotonic()
    why = ""
    while left and not why:
        until = min(last_output + patience_s, began + limit_s)
        ready = select.select(list(left), [], [], max(until - time.monotonic(), 0.0))[0]
        last_output = time.monotonic()
        if not ready:
            why = "limit" if last_output - began >= limit_s else "stuck"
        for pipe in ready:
            data = os.read(pipe, 65536)
            if not data or b"E" in data:
                del left[pipe]
    for rank in left.values():
        os.kill(pids[rank], _DUMP)
    time.sleep(1.0 if left else 0.0)
    for pid in pids:
        with suppress(ProcessLookupError):  # it is its group's only process, and has ended
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for pipe in pipes:
        os.close(pipe)
    return {"stuck": sorted(left.values()), "why": why, "took_s": time.monotonic() - began}


def serve() -> None:
    """Answer requests until the input ends."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        task = Task(**request["task"])
        os.makedirs(task.folder, exist_ok=True)
        found = _run_trial(task, request["command"], request["patience_s"], request["limit_s"])
        print(json.dumps(found), file=answers, flush=True)
