"""Groups of real ranks for the tests of training: processes with RANK and WORLD_SIZE, gloo, no launcher."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # every optimizer imports it: before what is there is taken from the garbage collector

from hpcddp.training.data.loader import Batch, TrainingLoader
from hpcddp.training.data.sampler import MicroBatch

_HERE = Path(__file__).parent
torch.set_num_threads(1)  # as in the ranks, which the sums are compared with; several only wait for each other


@dataclass(frozen=True)
class Outcome:
    """What became of a group: exit statuses (None: had to be killed) and outputs, by rank."""

    statuses: list[int | None]
    outputs: list[str]

    def check(self) -> Outcome:
        assert self.statuses == [0] * len(self.statuses), "\n".join(self.outputs)
        return self


RunRanks = Callable[..., Outcome]
RunPython = Callable[..., subprocess.CompletedProcess[str]]


class Heard(NamedTuple):
    """A micro batch of (x, y) and what a training loader says about it."""

    x: Any
    y: Any
    mean: float  # the factor of a mean loss
    samples: int
    total: int
    last: bool
    micro: MicroBatch


class Ear:
    """What a training loader tells the loop it feeds; this loop only keeps what was said last."""

    run_is_over = False
    inside = False

    def end_left_batch(self) -> None: ...

    def loop_starts(self, epoch: int) -> None: ...

    def count_batch(self) -> None: ...

    def batch_starts(self, batch: Batch) -> None:
        self.now = batch

    def batch_left(self, batch: Batch) -> None: ...

    def step_ends(self) -> bool:
        return False

    def reseed(self) -> None: ...


class Listening:
    """A training loader with a loop that only listens: gives each micro batch with what was said about it.

    The loader does not hold this object: in a cycle, the garbage collector would wait 5 s for each of its workers.
    """

    def __init__(self, make: Callable[[Ear], TrainingLoader]) -> None:
        self._ear = Ear()
        self._loader = make(self._ear)
        self.sampler = self._loader.sampler

    def __iter__(self) -> Iterator[Heard]:
        for content in self._loader:
            batch = self._ear.now
            parts = batch.contents() if batch.is_several else [(batch.parts[0], content)]
            for part, (x, y) in parts:
                micro = part.micro
                yield Heard(x, y, part.mean, micro.samples, micro.total, micro.last, micro)


def _load(name: str) -> ModuleType:
    """A module that the ranks run. (With --import-mode=importlib, tests cannot import each other.)"""
    spec = importlib.util.spec_from_file_location(name, _HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_runs_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: one process plays the attempts of a run, one after the other. The command is recorded."""
    monkeypatch.setattr("hpcddp.runs.settings.is_interactive", lambda: False)
    monkeypatch.setattr("hpcddp.runs.start.is_interactive", lambda: True)


@pytest.fixture(scope="session")
def batch_bodies() -> ModuleType:
    return _load("batch_bodies")


@pytest.fixture(scope="session")
def checkpoint_bodies() -> ModuleType:
    return _load("checkpoint_bodies")


@pytest.fixture(scope="session")
def _server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error::UserWarning", str(_HERE / "forkserver.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.stdin.write("end\n")
        server.stdin.close()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port for MASTER_PORT that is free, and that no other tests at the same time are given.

    It lies below the range of outgoing connections, so that none can take it before rank 0 does. Who has it holds the
    UDP port of the same number, which nothing else uses.
    """
    first = 37 * (os.getpid() % 541)
    for port in (12000 + (first + i) % 20000 for i in itertools.count()):
        with socket.socket(type=socket.SOCK_DGRAM) as mark, socket.socket() as probe:
            try:
                mark.bind(("", port))
                probe.bind(("", port))
            except OSError:
                continue
            probe.close()
            yield port
            return


@pytest.fixture
def free_ports() -> Iterator[Callable[[int], tuple[int, ...]]]:
    """Gives so many ports that no other tests at the same time are given, until the test ends."""
    with contextlib.ExitStack() as held:
        yield lambda count: tuple(held.enter_context(_free_port()) for _ in range(count))


@pytest.fixture
def run_ranks(_server: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest) -> RunRanks:
    """run_ranks("function of bodies.py", world_size, argument): start the ranks, wait for all of them.

    "module:function" takes it from another module of this folder.
    """
    groups = itertools.count()
    whole_end = request.node.get_closest_marker("slow") is not None

    def run(
        function: str,
        world_size: int,
        argument: Any = None,
        *,
        env: dict[str, str] | None = None,
        env_of_rank: dict[int, dict[str, str]] | None = None,
    ) -> Outcome:
        folder = tmp_path / f"outputs-{next(groups)}"
        folder.mkdir()
        with _free_port() as port:
            asked = {
                "function": function if ":" in function else f"bodies:{function}",
                "world_size": world_size,
                "argument": argument,
                "env": env or {},
                "env_of_rank": env_of_rank or {},
                "port": port,
                "outputs": str(folder),
                "whole_end": whole_end,
            }
            return Outcome(**_ask(_server, asked))

    return run


def _ask(server: subprocess.Popen[str], asked: dict[str, Any]) -> Any:
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def _python(folder: Path, outputs: Path, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **env}
    return {"words": words, "folder": str(folder), "env": environment, "outputs": str(outputs)}


@pytest.fixture
def run_python(_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> RunPython:
    """run_python(folder, "script.py", …, NAME="value"): what `python script.py …` does there, torch being imported.

    Its environment is PATH, OMP_NUM_THREADS=1 and what is given.
    """

    def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        answer = _ask(_server, _python(folder, tmp_path_factory.mktemp("python"), words, env))
        return subprocess.CompletedProcess(words, *answer["statuses"], *answer["outputs"])

    return run


class Started(NamedTuple):
    """A process that `start_python` has started."""

    pid: int
    wait: Callable[[], int]  # for its exit status


@pytest.fixture
def start_python(
    _server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Started]]:
    """As `run_python`, which does not wait for its end. What is left of it at the test's end is killed."""
    left: list[int] = []

    def wait(pid: int) -> int:
        left.remove(pid)
        (status,) = _ask(_server, {"ended": pid})
        return status

    def start(folder: Path, *words: str, **env: str) -> Started:
        asked = _python(folder, tmp_path_factory.mktemp("python"), words, env)
        left.append(_ask(_server, {**asked, "at_once": True}))
        return Started(left[-1], functools.partial(wait, left[-1]))

    yield start
    for pid in [*left]:
        os.kill(pid, signal.SIGKILL)
        wait(pid)
