"""Train on noise, exactly, and be struck by a fault: once, at one step, on one rank. From then on there is
`struck-STEP`, and `again` once rank 0 has made a step in a later start.

Arguments: steps, kind of fault, rank (of so many as there are), step, and seconds per step (0.1). Of several faults,
one after the other: kinds, ranks and steps with commas between them.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hpcddp

steps = int(sys.argv[1])
kinds, ranks, places = (word.split(",") for word in sys.argv[2:5])
faults = {int(at): (kind, int(rank)) for kind, rank, at in zip(kinds, ranks, places, strict=True)}
step_s = float(sys.argv[5]) if len(sys.argv) > 5 else 0.1


PATH = os.environ["PATH"]


def refuse(_file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind in {"error", "bug"}:
        raise ValueError("a value that no step can have")
    elif kind == "exit":
        os._exit(1)
    elif kind == "leave":
        os._exit(0)
    elif kind == "hang":
        time.sleep(10000)
    elif kind == "cut":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    elif kind == "glitch":  # back before anybody should mind
        subprocess.Popen(["sh", "-c", "ip link set eth0 down; sleep 2; ip link set eth0 up"])
    elif kind == "host":
        os.kill(-1, signal.SIGKILL)  # all of this process namespace but this process and its first one
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "return":  # long after the others have gone on without it
        subprocess.Popen(["sh", "-c", "ip link set eth0 down; sleep 40; ip link set eth0 up"], env={"PATH": PATH})
    elif kind == "save":  # the next one
        os.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "full":  # the disk, when the next checkpoint is written
        os.fsync = refuse
    elif kind == "companion":
        os.kill(os.getppid(), signal.SIGKILL)


had_struck = Path(f"struck-{min(faults)}").exists()
torch.manual_seed(0)
data = TensorDataset(torch.randn(8 * steps, 2), torch.randn(8 * steps, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcddp.runtime(global_batch=8, save_every=3, exact="integer") as rt:
    model = rt.wrap(model)
    loader = rt.loader(data)
    rt.track(model=model, optimizer=optimizer)
    for _epoch in rt.epochs(1):
        for x, y in loader:
            kind, struck = faults.get(rt.steps, ("none", -1))
            mark = Path(f"struck-{rt.steps}")
            if rt.rank == struck % rt.world_size and (kind == "bug" or not mark.exists()):
                mark.touch()
                strike(kind)
            rt.backward((model(x) - y).square().mean())
            rt.step(optimizer)
            if rt.rank == 0 and had_struck:
                Path("again").touch()
                had_struck = False
            time.sleep(step_s)
