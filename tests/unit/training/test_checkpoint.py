"""A checkpoint is whole or not there."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcddp.errors import RequestError
from hpcddp.training.keeping.checkpoint import (
    describe_file,
    find_fault,
    find_newest,
    list_checkpoints,
    read_checkpoint,
    remove_old,
    set_aside,
    write_checkpoint,
)


def _state(step: int) -> dict[str, object]:
    return {"weights": torch.full((1000,), float(step)), "position": {"step": step}}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1200, _state(1200), {"seed": 3})
    assert path.name == "step-00001200"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.pt"]
    assert torch.equal(read_checkpoint(path)["weights"], torch.full((1000,), 1200.0))
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["seed"]) == (1200, 3)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step, _state(step), {})
    paths = list_checkpoints(tmp_path)
    content = bytearray((paths[3] / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (paths[3] / "state.pt").write_bytes(content)
    (paths[2] / "manifest.json").unlink()
    os.truncate(paths[1] / "state.pt", 100)
    newest, damaged = find_newest(tmp_path)
    assert newest == paths[0]
    assert "SHA-256" in damaged[paths[3]]
    assert "manifest.json" in damaged[paths[2]]
    assert "100 bytes" in damaged[paths[1]]


def test_the_folder_of_a_step_is_never_written_twice(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, _state(1), {})
    before = (path / "state.pt").stat().st_ino
    write_checkpoint(tmp_path, 1, _state(2), {})
    assert (path / "state.pt").stat().st_ino == before
    set_aside(path)
    assert find_newest(tmp_path) == (None, {})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step, _state(step), {})
    remove_old(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000015"]


def test_a_checkpoint_with_code_in_it_is_not_unpickled(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, {"bad": print}, {})
    with pytest.raises(RequestError, match="more than tensors"):
        read_checkpoint(path)


def _write_in_place(folder: Path, step: int, state: dict[str, object], facts: dict[str, object]) -> None:
    """What most programs do: the newest checkpoint is written over the one before."""
    state_file, manifest = folder / "step-00000000" / "state.pt", folder / "step-00000000" / "manifest.json"
    torch.save(state, state_file)
    manifest.write_text(json.dumps({"step": step, "files": {"state.pt": describe_file(state_file)}}))


def _count_unreadable(write: Callable[..., object], kills: int, folder: Path) -> int:
    """How many kills at random moments, out of so many, leave a checkpoint that its own manifest refutes."""
    write_checkpoint(folder, 0, _state(0), {})
    chance = random.Random(1)
    unreadable = 0
    for _ in range(kills):
        first = 1 + max(int(path.name.removeprefix("step-")) for path in list_checkpoints(folder))
        pid = os.fork()
        if pid == 0:
            for step in range(first, first + 10_000):
                write(folder, step, _state(step), {})
                remove_old(folder, 2)
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert list_checkpoints(folder)
        unreadable += any(find_fault(path) for path in list_checkpoints(folder))
    return unreadable


@pytest.mark.parametrize("kills", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_every_checkpoint_readable(kills: int, tmp_path: Path) -> None:
    assert _count_unreadable(write_checkpoint, kills, tmp_path) == 0
    assert len(list_checkpoints(tmp_path)) > 1


def test_a_kill_while_a_checkpoint_is_written_in_place_leaves_it_unreadable(tmp_path: Path) -> None:
    """Negative control: the measure above sees what it is for."""
    assert _count_unreadable(_write_in_place, 30, tmp_path) > 0
