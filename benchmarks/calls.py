"""What one step of a plain loop costs in calls: those into hpcddp's functions, and the hpcddp modules they are in.

Counted by `sys.setprofile`, on one rank with and without a run folder, and on two ranks over gloo without one, after
some steps of warm-up; Accelerate's loop beside it, if that is installed. Times depend on the machine, and calls do not.
Usage: calls.py [--steps N] [--modules]; --modules shows how many calls are in each module.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

REPO = Path(__file__).parents[1]
WARM_UP = 60  # steps: the first ones are checked more closely, and on two ranks have an exchange each
TARGET = {"calls": 80, "modules": 12}

Steps = Iterator[None]  # each `next` makes one step


def make_parts(steps: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and data of both loops."""
    import torch
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    data = TensorDataset(torch.randn(16 * steps, 8), torch.randint(4, (16 * steps,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def with_hpcddp(steps: int, folder: str | None) -> Steps:
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    import hpcddp

    model, optimizer, data = make_parts(steps)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    with hpcddp.runtime(run_dir=folder) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        for _ in rt.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                yield


def with_accelerate(steps: int, _folder: str | None) -> Steps:
    from accelerate import Accelerator  # type: ignore[import-not-found]  # no dependency of this package
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    model, optimizer, data = make_parts(steps)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        yield


LOOPS: dict[str, tuple[Callable[[int, str | None], Steps], str]] = {
    "hpcddp": (with_hpcddp, "hpcddp"),
    "Accelerate": (with_accelerate, "accelerate"),
}


def count_calls(steps: Steps, package: str, counted: int) -> collections.Counter[tuple[str, str]]:
    """Calls of the package's functions in `counted` steps, by (module, function). Resuming a generator is a call."""
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for _ in range(WARM_UP):
        next(steps)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module == package or module.startswith(f"{package}."):
                calls[module, frame.f_code.co_name] += 1

    sys.setprofile(note)
    for _ in range(counted):
        next(steps)
    sys.setprofile(None)
    for _ in steps:
        pass
    return calls


def show(title: str, calls: collections.Counter[tuple[str, str]], counted: int, *, has_modules: bool) -> None:
    modules: collections.Counter[str] = collections.Counter()
    for (module, _), number in calls.items():
        modules[module] += number
    print(f"{title:36}{sum(calls.values()) / counted:8.1f}{len(modules):10d}")
    if has_modules:
        for module, number in modules.most_common():
            names = ", ".join(
                f"{name} {times / counted:g}" for (its, name), times in calls.most_common() if its == module
            )
            print(f"  {module:46}{number / counted:6.1f}  {names}")


def run_rank(args: argparse.Namespace) -> None:
    make_steps, package = LOOPS[args.loop]
    with tempfile.TemporaryDirectory() as mine:
        steps = make_steps(WARM_UP + args.steps + 5, f"{mine}/run" if args.folder else None)
        calls = count_calls(steps, package, args.steps)
    if os.environ["RANK"] == "0":
        size = int(os.environ["WORLD_SIZE"])
        title = f"{args.loop}, {size} rank{'s'[: size - 1]}{', with a run folder' if args.folder else ''}"
        show(title, calls, args.steps, has_modules=args.modules)


def run_world(size: int, loop: str, options: list[str]) -> bool:
    """Start the ranks of one row; returns whether they came to their end."""
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    place |= {"PYTHONPATH": REPO, "MASTER_PORT": random.randrange(12000, 32000)}
    words = [sys.executable, __file__, "--loop", loop, *options]
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **{k: str(v) for k, v in place.items()}, "RANK": str(r), "LOCAL_RANK": str(r)},
            stderr=subprocess.DEVNULL,
        )
        for r in range(size)
    ]
    statuses = [rank.wait() for rank in ranks]
    return not any(statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="that are counted")
    parser.add_argument("--modules", action="store_true")
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        run_rank(args)
        return 0
    print(f"{'per step':36}{'calls':>8}{'modules':>10}   target: {TARGET['calls']} and {TARGET['modules']}", flush=True)
    more = ["--steps", str(args.steps), *(["--modules"] if args.modules else [])]
    done = [run_world(1, "hpcddp", more), run_world(1, "hpcddp", [*more, "--folder"]), run_world(2, "hpcddp", more)]
    if not run_world(1, "Accelerate", more):
        print("Accelerate is left out: it is not installed")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
