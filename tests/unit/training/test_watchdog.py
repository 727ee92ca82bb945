"""Where the ranks stand once none gets on."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcddp.guard.hpcddp_stand import (
    MAY_WAIT,
    NO_WAIT,
    WAITS,
    describe_frames,
    judge_wait,
    list_frames,
    measure_children,
    walk_frames,
)
from hpcddp.runs.hang import Stand, format_stands, name_ranks
from hpcddp.training.watchdog import find_stand
from tests.conftest import PATIENCE_S

RunRanks = Callable[..., Any]


def test_a_collective_that_one_rank_calls_alone_is_named_with_its_line_and_nothing_is_ended(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    body = "watchdog_bodies:call_a_collective_on_one_rank_only"
    outcome = run_ranks(body, 2, str(tmp_path), env={"HPCDDP_WATCHDOG": "0.4"}).check()
    for name in ("first", "second"):
        first, *lines, last = (tmp_path / name).read_text().splitlines()
        assert first == "no progress for 0.4 s. The ranks stand at:"
        assert sorted(line.partition("watchdog_bodies.py:")[0] for line in lines) == ["  rank 0  ", "  rank 1  "]
        waiting = next(line for line in lines if "rank 0" in line)
        assert waiting.endswith(", in _call: total = rt.sum(1) (in all_reduce)")
        assert "nothing is ended" in last
        assert [(tmp_path / f"{name}-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert "hpcddp: no progress" in outcome.outputs[0]


def test_a_stand_is_the_innermost_line_of_the_users_own_code() -> None:
    stands = []

    def key(_: object) -> int:
        stands.append(find_stand(walk_frames(sys._getframe()), 61.0))
        return 0

    sorted([1], key=key)
    [stand] = stands
    assert stand.line.startswith("test_watchdog.py:")
    assert stand.line.endswith("in key: stands.append(find_stand(walk_frames(sys._getframe()), 61.0))")
    assert (stand.inside, stand.seconds) == ("", 61.0)


def test_what_the_users_line_has_called_is_named() -> None:
    import json

    stands = []

    class Odd(dict[str, int]):
        def items(self) -> Any:
            frame = sys._getframe().f_back
            assert frame is not None
            stands.append(find_stand(walk_frames(frame), 1.0))
            return super().items()

    json.dumps(Odd(a=1), indent=1)
    assert (stands[0].inside, stands[0].waits) == ("_iterencode_dict", NO_WAIT)
    assert stands[0].line.endswith(": json.dumps(Odd(a=1), indent=1)")


@pytest.mark.parametrize(
    ("module", "line", "waits"),
    [
        ("torch.distributed.distributed_c10d", "dist.monitored_barrier()", WAITS),
        ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "y = model(x)", WAITS),
        ("torch.autograd.graph", "rt.backward(loss)", MAY_WAIT),  # DDP's ranks wait here most of the time
        ("torch._ops", "y = model(x)", MAY_WAIT),
        ("torch.distributed.tensor._dispatch", "y = model(x)", MAY_WAIT),
        ("torch.cuda", "torch.cuda.synchronize()", MAY_WAIT),
        ("", "work.wait()", MAY_WAIT),
        ("", "total += loss.item()", MAY_WAIT),
        ("", "time.sleep(1000)", NO_WAIT),
        ("torch.utils.data.dataloader", "for x in loader:", NO_WAIT),
        ("torch.distributed.checkpoint.filesystem", "dcp.save(state)", NO_WAIT),
    ],
)
def test_a_rank_that_stands_in_a_collective_or_for_a_device_waits(module: str, line: str, waits: int) -> None:
    assert judge_wait(module, line) == waits


def test_ranks_at_one_line_stand_together_and_the_silent_are_named() -> None:
    there = Stand("train.py:41, in main: dist.barrier()", "barrier", 61.0)
    moves = Stand("train.py:37, in main: x.sum()", "", 0.0)
    stands = {0: moves, 1: there, 2: there, 4: there, 6: moves._replace(quiet_s=61.0)}
    assert format_stands(stands, 7, 60.0).splitlines() == [
        "no progress for 60 s. The ranks stand at:",
        "  ranks 1-2, 4  train.py:41, in main: dist.barrier() (in barrier)",
        "  ranks 3, 5  no answer",
        "  rank 0  train.py:37, in main: x.sum(); it gets on",
        "  rank 6  train.py:37, in main: x.sum(); it computes, and reads and writes nothing",
        "  nothing is ended; a collective that some ranks never call ends at torch's own timeout",
    ]


def test_ranks_are_named_by_spans() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2, 6, 9]) == "ranks 0-2, 5-6, 9"


def test_a_thread_between_two_lines_stands_at_the_first_of_its_function(tmp_path: Path) -> None:
    # A path that no file has: Python looks a bare train.py up in all of sys.path, and a test before may have left one.
    code = compile("x = 1", str(tmp_path / "train.py"), "exec")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_globals={})
    assert describe_frames([frame])[:2] == ("train.py:1, in <module>", "")


def test_no_garbage_is_collected_while_another_threads_frames_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    collects = []
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or {})
    assert list_frames(0) == []
    assert (collects, gc.isenabled()) == ([False], True)


def test_what_a_ranks_children_use_of_the_processor_is_seen_also_below_a_shell() -> None:
    loop = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(["sh", "-c", f"{shlex.join(loop)}; true"], start_new_session=True) as shell:
        before, until = measure_children(os.getpid()), time.monotonic() + PATIENCE_S
        while measure_children(os.getpid()) <= before + 5:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.killpg(shell.pid, signal.SIGKILL)
