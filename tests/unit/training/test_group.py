"""Bringing a process group up, and what is said when it cannot be."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import LaunchError
from hpcddp.training.bringup.device import choose_index, list_visible, name_shared, wants_device_id
from hpcddp.training.bringup.store import host_store, reach_store

RunRanks = Callable[..., Any]


def _free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("", 0))
    ports = tuple(probe.getsockname()[1] for probe in sockets)
    for probe in sockets:
        probe.close()
    return ports


def test_every_rank_knows_its_place_and_the_group_works(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("meet", 3, {"folder": str(tmp_path)}).check()
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(3)]
    assert seen == [{"rank": rank, "size": 3, "local": rank, "sum": 3.0} for rank in range(3)]


def test_a_single_process_without_a_launcher_is_a_group_of_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = dict.fromkeys(named)
    run_ranks("meet", 1, {"folder": str(tmp_path)}, env=alone).check()
    assert json.loads((tmp_path / "seen-0.json").read_text())["size"] == 1


def test_a_missing_rank_is_named_within_the_time_given(run_ranks: RunRanks, tmp_path: Path) -> None:
    began = time.monotonic()
    argument = {"folder": str(tmp_path), "arrival_timeout_s": 2}
    outcome = run_ranks("meet", 2, argument, env={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert time.monotonic() - began < 20
    assert outcome.statuses == [1, 1]
    assert "2 of 4 ranks did not arrive in 2 s: rank 2, 3" in outcome.outputs[0]


def test_a_rank_that_exists_twice_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    env_of_rank = {2: {"RANK": "1"}}
    outcome = run_ranks("meet", 3, {"folder": str(tmp_path), "arrival_timeout_s": 20}, env_of_rank=env_of_rank)
    assert outcome.statuses == [1, 1, 1]
    assert "rank 1 exists 2 times" in outcome.outputs[0]


def test_two_processes_that_are_both_rank_0_are_told_so(run_ranks: RunRanks, tmp_path: Path) -> None:
    env_of_rank = {1: {"RANK": "0"}}
    outcome = run_ranks("meet", 2, {"folder": str(tmp_path), "arrival_timeout_s": 5}, env_of_rank=env_of_rank)
    assert outcome.statuses == [1, 1]
    assert "two processes of this job say that they are rank 0" in "".join(outcome.outputs)


def test_a_busy_port_is_passed_over_by_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if what listens there never says a word."""
    monkeypatch.setattr("hpcddp.training.bringup.store._ANSWER_TIMEOUT_S", 0.5)
    ports = _free_ports(2)
    with socket.socket() as other:
        other.bind(("", ports[0]))
        other.listen()
        store = host_store(ports, 2, "this job", 5)
        assert store.port == ports[1]
        client = reach_store("localhost", ports, "this job", 20)
    client.set("word", "said")
    assert store.get("word") == b"said"


def test_the_store_of_another_job_is_not_taken_for_this_one() -> None:
    ports = _free_ports(2)
    other = host_store(ports, 2, "another job", 5)
    mine = host_store(ports, 2, "this job", 5)
    assert (other.port, mine.port) == ports
    assert reach_store("localhost", ports, "this job", 5).port == ports[1]


def test_rank_0_that_never_comes_is_an_error_with_its_address() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 was not found at localhost, ports \d+, within 1 s"):
        reach_store("localhost", _free_ports(1), "this job", 1)


def test_an_address_that_does_not_resolve_is_an_error_at_once() -> None:
    with pytest.raises(LaunchError, match=r"'no-such-host.invalid' does not resolve"):
        reach_store("no-such-host.invalid", (12345,), "this job", 60)


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "index"),
    [(1, 3, 4, 0), (4, 3, 4, 3), (8, 3, 4, 3), (1, 0, 1, 0)],
)
def test_the_device_index_is_not_the_local_rank(
    visible: int, local_rank: int, local_world_size: int, index: int
) -> None:
    assert choose_index(visible, local_rank, local_world_size) == index


def test_fewer_gpus_than_ranks_are_refused() -> None:
    with pytest.raises(LaunchError, match="4 ranks on this node see 2 GPUs"):
        choose_index(2, 0, 4)


def test_labels_are_what_the_scheduler_calls_the_devices() -> None:
    assert list_visible(2, "GPU-aa,GPU-bb") == ("GPU-aa", "GPU-bb")
    assert list_visible(2, None) == ("0", "1")
    assert list_visible(0, "3,4") == ()


def test_two_ranks_on_one_gpu_are_named() -> None:
    assert name_shared([("a", "0"), ("b", "0"), ("a", "1")]) is None
    assert name_shared([("a", "0"), ("b", "0"), ("a", "0")]) == "ranks 0 and 2 both got GPU 0 of a"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("2.5.1", True), ("2.6.0+cu124", False), ("2.7.0", False), ("2.7.1", True), ("2.15.0+cu132", True)],
)
def test_device_id_is_left_out_where_torch_is_faulty(version: str, wanted: bool) -> None:
    assert wants_device_id(version) is wanted


def test_env_imports_no_torch() -> None:
    code = "import hpcddp, sys; p = hpcddp.env(); print(p.launcher, p.rank, p.world_size, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert done.stdout == "none 0 1 False\n"
