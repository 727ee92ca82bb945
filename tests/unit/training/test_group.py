"""Bringing a process group up, and what is said when it cannot be."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import hpcddp
from hpcddp.errors import LaunchError, RequestError
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError, claim_first
from hpcddp.training.rendezvous.group import Member, take_devices
from hpcddp.training.rendezvous.store import host_store, reach_store
from hpcddp.training.torch_compat import host_tcp_store

RunRanks = Callable[..., Any]

FreePorts = Callable[[int], tuple[int, ...]]


def test_every_rank_knows_its_place_and_the_group_works(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("meet", 3, {"folder": str(tmp_path)}).check()
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(3)]
    assert seen == [{"rank": rank, "size": 3, "local": rank, "sum": 3.0} for rank in range(3)]


@pytest.mark.parametrize("backend", ["mpi", "fake", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_this_torch_does_not_have_is_refused_with_those_that_it_has(backend: str) -> None:
    words = rf"has no backend '{backend}'\nhint: one of gloo"
    with pytest.raises(RequestError, match=words), hpcddp.init(backend=backend):
        pass


def test_a_single_process_without_a_launcher_is_a_group_of_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = dict.fromkeys(named)
    run_ranks("meet", 1, {"folder": str(tmp_path)}, env=alone).check()
    assert json.loads((tmp_path / "seen-0.json").read_text())["size"] == 1


def test_a_missing_rank_is_named_when_the_time_given_is_over(run_ranks: RunRanks, tmp_path: Path) -> None:
    argument = {"folder": str(tmp_path), "given_up_when": "rank 1 is here"}
    outcome = run_ranks("meet_in_vain", 2, argument, env={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert outcome.statuses == [1, 1]
    assert "2 of 4 ranks did not arrive in 1 s: rank 2, 3" in outcome.outputs[0]


def test_a_rank_that_exists_twice_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    env_of_rank = {2: {"RANK": "1"}}
    outcome = run_ranks("meet", 3, {"folder": str(tmp_path)}, env_of_rank=env_of_rank)
    assert outcome.statuses == [1, 1, 1]
    assert "rank 1 exists 2 times" in outcome.outputs[0]


def test_two_processes_that_are_both_rank_0_are_told_so(run_ranks: RunRanks, tmp_path: Path) -> None:
    env_of_rank = {1: {"RANK": "0"}}
    argument = {"folder": str(tmp_path), "given_up_when": "the other has ended"}
    outcome = run_ranks("meet_in_vain", 2, argument, env_of_rank=env_of_rank)
    assert outcome.statuses == [1, 1]
    assert "two processes of this job say that they are rank 0" in "".join(outcome.outputs)


def test_one_process_opens_one_group_after_another_while_their_stores_still_listen(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("meet_often", 2, {"folder": str(tmp_path)}).check()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"sums-{rank}.json").read_text()) == [1 + 2 * number for number in range(8)]


def test_a_port_of_a_silent_program_or_of_another_job_is_passed_over_by_all_ranks_alike(
    free_ports: FreePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.training.rendezvous.store._ANSWER_TIMEOUT_S", 0.5)
    ports, threads = free_ports(3), threading.active_count()
    with socket.socket() as silent:
        silent.bind(("", ports[0]))
        silent.listen()
        other = host_store(ports[1:], "another job", 600)
        store = host_store(ports, "this job", 600)
        assert (other.port, store.port) == ports[1:]
        client = reach_store("localhost", ports, "this job", 600)
    assert threading.active_count() == threads, "none is left that waits for an answer; it could abort Python's end"
    client.set("word", "said")
    assert store.get("word") == b"said"


def test_rank_0_that_never_comes_is_an_error_with_its_address(free_ports: FreePorts) -> None:
    with pytest.raises(LaunchError, match=r"rank 0 was not found at localhost, ports \d+, within 1 s"):
        reach_store("localhost", free_ports(1), "this job", 1)


def test_an_address_that_does_not_resolve_is_an_error_at_once() -> None:
    with pytest.raises(LaunchError, match=r"'no-such-host.invalid' does not resolve"):
        reach_store("no-such-host.invalid", (12345,), "this job", 60)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    members = tuple(Member(rank, "a", 1, rank, "0", ("GPU-1f",)) for rank in range(2))
    with pytest.raises(LaunchError, match="ranks 0 and 1 both got GPU GPU-1f of a") as told:
        take_devices("nccl", members, 1)
    assert told.value.hint.startswith("fewer --ranks-per-node, or more GPUs")


def test_env_imports_no_torch() -> None:
    code = "import hpcddp, sys; p = hpcddp.env(); print(p.launcher, p.rank, p.world_size, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert done.stdout == "none 0 1 False\n"


@pytest.mark.parametrize(
    ("code", "env", "expected"),
    [
        ("hpcddp.env()", {"RANK": "5", "WORLD_SIZE": "2"}, (4, "hpcddp: ")),
        ("hpcddp.env()", {"SLURM_PROCID": "abc", "SLURM_STEP_NUM_TASKS": "2"}, (4, "hpcddp: ")),
        ("hpcddp.load('no-such-run')", {}, (2, "hpcddp: ")),
    ],
    ids=["rank 5 of 2", "a word for a number", "no run"],
)
def test_an_uncaught_mistake_ends_a_script_in_two_lines(
    code: str, env: dict[str, str], expected: tuple[int, str]
) -> None:
    caught = f"import hpcddp, hpcddp.errors\ntry: {code}\nexcept hpcddp.errors.HpcddpError: pass\n1 / 0"
    for program, found in ((f"import hpcddp; {code}", expected), (caught, (1, "Traceback"))):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
        first, second, *more = done.stderr.splitlines()
        assert (done.returncode, first.startswith(found[1])) == (found[0], True), done.stderr
        assert found[0] == 1 or (second.startswith("hint: ") and not more)


def test_a_rank_that_finds_the_store_gone_accuses_nobody(free_ports: FreePorts) -> None:
    (port,) = free_ports(1)
    host = host_tcp_store(port, timedelta(seconds=60))
    store = TCPStore("localhost", port, 2, False, timedelta(seconds=60))
    del host
    first = claim_first(store, Failure(1, "node1", "ValueError: a connection broke"), "node0")
    told = PeerFailedError(first)
    assert told.message == "rank 0 on node0 ended before it could say which rank failed first"
