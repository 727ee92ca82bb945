"""Groups of real ranks for the tests of training: processes with RANK and WORLD_SIZE, gloo, no launcher."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """What became of a group: exit statuses (None: had to be killed) and outputs, by rank."""

    statuses: list[int | None]
    outputs: list[str]

    def check(self) -> Outcome:
        assert self.statuses == [0] * len(self.statuses), "\n".join(self.outputs)
        return self


RunRanks = Callable[..., Outcome]


def _load(name: str) -> ModuleType:
    """A module that the ranks run. (With --import-mode=importlib, tests cannot import each other.)"""
    spec = importlib.util.spec_from_file_location(name, _HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bodies() -> ModuleType:
    return _load("bodies")


@pytest.fixture(scope="session")
def batch_bodies() -> ModuleType:
    return _load("batch_bodies")


@pytest.fixture(scope="session")
def exact_bodies() -> ModuleType:
    return _load("exact_bodies")


@pytest.fixture(scope="session")
def _server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error::UserWarning", str(_HERE / "forkserver.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def run_ranks(_server: subprocess.Popen[str], tmp_path: Path) -> RunRanks:
    """run_ranks("function of bodies.py", world_size, argument): start the ranks, wait for all of them.

    "module:function" takes it from another module of this folder.
    """

    def run(
        function: str,
        world_size: int,
        argument: Any = None,
        *,
        env: dict[str, str] | None = None,
        env_of_rank: dict[int, dict[str, str]] | None = None,
        timeout_s: float = 60,
    ) -> Outcome:
        folder = tmp_path / f"outputs-{random.randrange(10**9)}"
        folder.mkdir()
        request = {
            "function": function if ":" in function else f"bodies:{function}",
            "world_size": world_size,
            "argument": argument,
            "env": env or {},
            "env_of_rank": env_of_rank or {},
            "port": random.randrange(12000, 32000),
            "folder": str(folder),
            "timeout_s": timeout_s,
        }
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        answer = json.loads(_server.stdout.readline())
        return Outcome(answer["statuses"], answer["outputs"])

    return run
