"""What the ranks of test_watchdog.py run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch.distributed as dist

import hpcddp
from hpcddp.training import watchdog
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.report import Report


def call_a_collective_on_one_rank_only(folder: str) -> None:
    """In two runtimes of one group: rank 0 sums, rank 1 waits until rank 0 has said where both stand; then it sums too,
    and both get on."""
    watchdog._LONGEST_PAUSE_S = 600.0  # how long rank 0 waits for an answer, on a machine however busy
    print_line = Report.print_line
    with hpcddp.init() as group:
        for name in ("first", "second"):
            _call(Path(folder, name), group)
            Report.print_line = print_line  # type: ignore[method-assign]  # to hear the next


def _call(said: Path, group: Group) -> None:
    print_line = Report.print_line

    def say_and_note(report: Report, text: str) -> None:
        print_line(report, text)
        if "(in all_reduce)" in text:  # a busy machine may stand elsewhere, too
            said.write_text(text)

    Report.print_line = say_and_note  # type: ignore[method-assign]  # to hear it
    with hpcddp.runtime(8, group=group) as rt:
        if not rt.is_main:
            while not said.exists():
                time.sleep(0.01)
        total = rt.sum(1)
        Path(f"{said}-{group.rank}").write_text(str(total))


def never_come_to_a_sum(folder: str) -> None:
    """Rank 1 waits for what never comes, and rank 0 for rank 1, in a runtime."""
    held = threading.Event()
    with hpcddp.runtime(8, run_dir=folder) as rt:
        if rt.rank:
            held.wait()
        rt.sum(1)


def never_come_to_a_barrier(_folder: str) -> None:
    """The same in a group alone."""
    held = threading.Event()
    with hpcddp.init() as group:
        if group.rank:
            held.wait()
        dist.barrier()


def loop_without_end(_folder: str) -> None:
    """Rank 1 makes no step any more, but computes."""
    with hpcddp.runtime(8) as rt:
        while rt.rank:
            pass
        rt.sum(1)
