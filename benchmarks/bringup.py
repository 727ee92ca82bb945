"""What bringing up the ranks costs: from the start of mpirun to the end of the first all-reduce, 2 ranks on this host.

A hand-written start (rank and size from the launcher's variables, `init_process_group` with an address and a port), the
same script with `env://` under `hpcddp exec`, and `hpcddp.init()`. They run in turn, in an order that changes from
round to round; the ratio of each round is taken to the hand-written start of the same round, and the median of the
ratios is told, so that other work on the machine meets all alike.
Usage: bringup.py [--rounds N] [--ranks W] [--check]; --check exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(sys.executable).parent
TARGET = 1.05
HAND = "by hand"

# Each writes the times at which it had imported torch, had its group, and had summed, in seconds of the host's clock.
BEGIN = """
import os, sys, time
began = time.monotonic()
import torch
import torch.distributed as dist
torch.set_num_threads(1)
imported = time.monotonic()
"""
SUM = """
joined = time.monotonic()
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        print(began, imported, joined, time.monotonic(), file=file)
"""
PROGRAMS = {
    HAND: f"""{BEGIN}
rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
address = f"tcp://127.0.0.1:{{os.environ['PORT']}}"
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
{SUM}
dist.destroy_process_group()
""",
    "hpcddp exec": f"""{BEGIN}
dist.init_process_group("gloo")
{SUM}
dist.destroy_process_group()
""",
    "hpcddp.init()": f"""{BEGIN}
import hpcddp
with hpcddp.init(backend="gloo"):
    {SUM.strip().replace(chr(10), chr(10) + "    ")}
""",
}
PHASES = ("to Python", "import torch", "process group", "all-reduce")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Measured(NamedTuple):
    ends: list[float]  # seconds from the launch to the end of each phase on rank 0; the last is the whole
    cpu_s: float  # of mpirun and all ranks, to their end


def bring_up(name: str, folder: Path, ranks: int) -> Measured:
    """Launch it once. It must succeed."""
    script, out = folder / f"{name.replace(' ', '-')}.py", folder / "times"
    script.write_text(PROGRAMS[name])
    env = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    env |= {"PATH": f"{SCRIPTS}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PORT": str(free_port())}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    through = [str(SCRIPTS / "hpcddp"), "exec", "--"] if name == "hpcddp exec" else []
    launch = [str(SCRIPTS / "mpirun"), "--map-by", "slot:OVERSUBSCRIBE", "-np", str(ranks)]
    began = time.monotonic()
    command = [*launch, *through, sys.executable, str(script), str(out)]
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    ends = [float(moment) - began for moment in out.read_text().split()]
    return Measured(ends, used.ru_utime + used.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    names = list(PROGRAMS)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:  # byte code and disk cache
            bring_up(name, Path(folder), args.ranks)
        before = os.getloadavg()[0]
        for turn in range(args.rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            rounds.append({name: bring_up(name, Path(folder), args.ranks) for name in order})
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{args.ranks} ranks, {args.rounds} rounds, {os.cpu_count()} cores, {load}; seconds, medians\n")
    heads = (*PHASES, "whole", "ratio", "of least", "CPU", "ratio")
    print(f"{'':16}" + "".join(f"{head:>14}" for head in heads))
    missed = 0
    for name in names:
        ends = [statistics.median(one[name].ends[i] for one in rounds) for i in range(len(PHASES))]
        parts = [end - start for end, start in zip(ends, [0.0, *ends], strict=False)]
        ratio = statistics.median(one[name].ends[-1] / one[HAND].ends[-1] for one in rounds)
        least = min(one[name].ends[-1] for one in rounds) / min(one[HAND].ends[-1] for one in rounds)
        cpu = statistics.median(one[name].cpu_s for one in rounds)
        cpu_ratio = statistics.median(one[name].cpu_s / one[HAND].cpu_s for one in rounds)
        missed += ratio > TARGET
        outcome = "" if name == HAND else f"  {'ok' if ratio <= TARGET else 'MISSED'} (target {TARGET})"
        shown = "".join(f"{number:14.3f}" for number in (*parts, ends[-1], ratio, least, cpu, cpu_ratio))
        print(f"{name:16}{shown}{outcome}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
