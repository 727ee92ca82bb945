"""The way of the samples to the step: what is copied ahead, and how long the step waits."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hpcddp.batchplan import plan_batch
from hpcddp.training.data.loader import (
    Batch,
    Copies,
    InputWait,
    TrainingLoader,
    map_parts,
)
from hpcddp.training.data.randomness import WorkerStart
from hpcddp.training.data.reading import Reading
from hpcddp.training.data.sampler import GlobalBatchSampler, MicroBatch
from hpcddp.training.data.weighing import WeighedBatch, Weighing, Weight
from hpcddp.training.parallel.layout import plan_layout
from hpcddp.training.remarks import describe_starving
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import Member
from hpcddp.training.torch_compat import HashStore

from .conftest import Ear, unheard

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Images(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_ranks_that_may_use_the_same_cpus_share_them() -> None:
    cpus = ["0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7", "8,9", "0,1,2,3,4,5,6,7"]
    hosts = "AAAB"
    members = tuple(Member(n, hosts[n], n, None, cpus[n], ()) for n in range(4))
    shares = [Group(n, 4, "none", "gloo", CPU, members, HashStore()).cpus for n in range(4)]
    assert shares == [4, 4, 2, 8]


class Noting:
    """Copies to no device, and what was done when."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def start(self, content: Any) -> Callable[[], Any]:
        self._done.append(f"copy {content}")
        return lambda: content


APART = ["copy 0", "use 0", "copy 1", "use 1", "copy 2", "use 2", "copy 3", "use 3"]
AHEAD = ["copy 0", "copy 1", "use 0", "copy 2", "use 1", "copy 3", "use 2", "use 3"]


def _batch(contents: list[Any], copies: Any) -> Batch:
    count = len(contents)
    micros = [MicroBatch(n, 1, count, n, n == count - 1) for n in range(count)]
    parts = [WeighedBatch(micro, Weight(micro.nth, 1.0, 1.0), one) for micro, one in zip(micros, contents, strict=True)]
    return Batch(parts, copies, is_several=True)


def test_the_copy_of_the_next_micro_batch_begins_before_the_loop_computes_and_order_stays() -> None:
    done: list[str] = []
    for (micro, weight, _), content in _batch([0, 1, 2, 3], Noting(done)).contents():
        assert micro.nth == weight.counted == content
        done.append(f"use {content}")
    assert done == AHEAD


@pytest.mark.parametrize(("ahead", "expected"), [(False, APART), (True, AHEAD)])
def test_the_copy_of_the_next_batch_begins_before_only_where_it_runs_none_of_the_scripts_code(
    ahead: bool, expected: list[str]
) -> None:
    done: list[str] = []
    sampler = GlobalBatchSampler(4, plan_batch(1, 1), 0, shuffle=False)
    weighing = Weighing(1, plan_layout(0, 1), CPU)
    reading = Reading(0, collate_fn=_only)
    loader = TrainingLoader(Images(), sampler, CPU, weighing, reading, Ear(), unheard(), is_several=False)
    assert not loader._ahead
    loader._copies, loader._ahead = Noting(done), ahead
    for content in loader:
        done.append(f"use {content}")
    assert done == expected


def _only(samples: list[Any]) -> Any:
    return samples[0]


class Pair(NamedTuple):
    a: Any
    b: Any


class Encoding:
    def to(self, device: torch.device) -> Encoding:
        return self


@dataclass
class Labelled:
    x: Any
    y: Any


class Options(dict[str, Any]):
    """A dict of the script's own, which moves as one."""


def test_each_tensor_and_what_moves_itself_is_moved_and_all_else_stays() -> None:
    one, two, encoding = torch.zeros(1), torch.ones(1), Encoding()
    batch = {"x": (one, [two]), "pair": Pair(encoding, 3), "more": Labelled(one, Options(z=two)), "name": "cat"}
    found: list[Any] = []
    changed = map_parts(batch, lambda part: found.append(part) or "moved")
    assert found == [one, two, encoding, one, two]
    more = Labelled("moved", Options(z="moved"))
    assert changed == {"x": ("moved", ["moved"]), "pair": Pair("moved", 3), "more": more, "name": "cat"}
    assert type(changed["more"].y) is Options
    assert Copies(CPU).start((one, encoding))()[0] is one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_copied_beside_the_computation_arrives_whole() -> None:
    copies = Copies(GPU)
    batches = [torch.full((1 << 20,), float(n)).pin_memory() for n in range(20)]
    sums = [content.double().sum() for _, content in _batch(batches, copies).contents()]
    assert [float(total) for total in sums] == [n * float(1 << 20) for n in range(20)]


class Clock:
    """Seconds that a test lets go by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def items(self, count: int, wait_s: float) -> Iterator[int]:
        for n in range(count):
            self.now += wait_s
            yield n


def _loop(clock: Clock, waits: InputWait, count: int, wait_s: float, step_s: float, epoch: int = 0) -> None:
    for _ in waits.over(clock.items(count, wait_s), epoch):
        clock.now += step_s


@pytest.mark.parametrize(
    ("count", "wait_s", "step_s", "said"),
    [
        (200, 0.1, 0.3, [0.25]),
        (200, 0.1, 2.0, []),  # less than a tenth
        (90, 0.1, 0.1, []),  # less than 10 s
    ],
)
def test_a_loop_that_waits_for_more_than_10_s_and_a_tenth_of_its_time_is_said_once(
    count: int, wait_s: float, step_s: float, said: list[float]
) -> None:
    clock, heard = Clock(), []
    waits = InputWait(lambda _: None, heard.append, clock)
    for _ in range(2):
        _loop(clock, waits, count, wait_s, step_s)
        waits.end_loop()
        assert heard == pytest.approx(said, rel=0.01)


def test_each_loop_over_the_loader_is_written_when_the_next_starts_or_the_run_ends() -> None:
    clock, written = Clock(), []
    waits = InputWait(written.append, lambda _: None, clock)
    _loop(clock, waits, 4, 1.0, 3.0)
    assert written == []
    for _ in itertools.islice(waits.over(clock.items(9, 1.0), 1), 2):
        clock.now += 1.0
    waits.end_loop()
    waits.end_loop()
    assert written == [
        {"epoch": 0, "micro_batches": 4, "wait_s": 4.0, "loop_s": 13.0, "share": 0.3077},
        {"epoch": 1, "micro_batches": 2, "wait_s": 2.0, "loop_s": 3.0, "share": 0.6667},
    ]


def test_the_warning_names_what_helps() -> None:
    assert describe_starving(0.42, 0, 8).endswith(
        "42% of the time, with 0 workers; set num_workers=7 in the DataLoader or rt.loader"
    )
    assert "--cpus-per-rank" in describe_starving(0.42, 1, 2)


class Tied:
    """Garbage that says where it is destroyed, as a process group's threads would by a crash."""

    def __init__(self, told: Path) -> None:
        self.me, self.told, self.maker = self, told, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.maker:
            self.told.touch()


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_a_loader_process_destroys_nothing_that_it_has_from_its_rank(tmp_path: Path) -> None:
    gc.disable()
    try:
        Tied(tmp_path / "told")
        loader = DataLoader(
            Collecting(), num_workers=1, worker_init_fn=WorkerStart(None), multiprocessing_context="fork"
        )
        assert len(list(loader)) == 2
    finally:
        gc.enable()
    assert not (tmp_path / "told").exists()
