"""What it costs to look at a job: at each rank's main thread twice a second (hangs, phases), at each node every
ten seconds (efficiency), and at a rank's stacks on demand. CPU time of the looks themselves, by the kernel's clocks of
their threads. Targets: 0.1 % of a core for each rank, 0.5 % for each node.
Usage: watch.py [--seconds N] [--check]; --check exits 1 when a target is missed. Needs torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from hpcddp import guard

sys.path[:0] = guard.__path__
import hpcddp_stand  # type: ignore[import-not-found]  # noqa: E402  # as a rank has it
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from hpcddp.runs.folder import AttemptFolder, RunFolder  # noqa: E402
from hpcddp.supervisor.usage import Sampler  # noqa: E402

TARGET_RANK, TARGET_NODE = 0.001, 0.005
DEPTH = 30  # functions above the one that looks for work


def train(seconds: float) -> None:
    """Steps of a small network, in this process group of one."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def within(depth: int, work: Callable[[], None]) -> None:
    """Below so many functions."""
    within(depth - 1, work) if depth else work()


def measure_rank(seconds: float) -> float:
    """The share of a core."""
    page = os.memfd_create("page")
    entry = hpcddp_stand.Entry(page, 0)
    hpcddp_stand.ThreadWatch(entry, lambda: True, waits=True)
    thread = next(one for one in threading.enumerate() if one.name == "hpcddp-pulse")
    within(DEPTH, lambda: train(2.0))  # the first looks import and read source lines
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before, began = time.clock_gettime(clock), time.monotonic()
    within(DEPTH, lambda: train(seconds))
    return (time.clock_gettime(clock) - before) / (time.monotonic() - began)


def measure_node(looks: int) -> tuple[float, int]:
    """CPU seconds for a look, and how many processes this host has."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = AttemptFolder(RunFolder(folder), "1.1")
        os.makedirs(attempt.path)
        sampler = Sampler(attempt, "node", os.environ, lambda: [0.0] * 6)
        sampler._open()
        sampler._look(1)  # asks each process once
        began = time.process_time()
        for _ in range(looks):
            sampler._look(1)
        return (time.process_time() - began) / looks, sum(map(str.isdecimal, os.listdir("/proc")))


def measure_stacks(times: int) -> float:
    """Seconds for which a rank writes its stacks, of this many frames."""
    taken = 0.0

    def ask() -> None:
        nonlocal taken
        began = time.perf_counter()
        for _ in range(times):
            os.kill(os.getpid(), hpcddp_stand.ASK_FOR_STACKS)
        taken = time.perf_counter() - began

    within(DEPTH, ask)
    return taken / times


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rank = measure_rank(args.seconds)
    look_s, processes = measure_node(200)
    stacks_s = measure_stacks(200)
    signal.signal(hpcddp_stand.ASK_FOR_STACKS, signal.SIG_IGN)
    print(f"rank: {100 * rank:.3f} % of a core (at most {100 * TARGET_RANK:g} %)")
    print(f"node: {1000 * look_s:.2f} ms for a look, {100 * look_s / 10:.3f} % of a core; {processes} processes")
    print(f"stacks: a rank is interrupted for {1000 * stacks_s:.2f} ms")
    return int(args.check and (rank > TARGET_RANK or look_s / 10 > TARGET_NODE))


if __name__ == "__main__":
    sys.exit(main())
