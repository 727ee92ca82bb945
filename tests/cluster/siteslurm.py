"""A Slurm as each site has it, for `sbatch --test-only`: its partitions, node shapes, GPUs and features.

Its nodes are cloud nodes that are never started: a controller alone judges requests. Accounts and QOS are taken
as they come, since there is no accounting here to know them.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bringup.hosts import enter

from hpcddp.script.site import Queue, Site

NODES = 4  # of each queue: one more than any golden asks for
_PORT = 7817  # beside the cluster's own controller

_CONF = """\
ClusterName={name}
SlurmctldHost=login
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# cloud nodes count as there, although nothing ever starts them
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=INFINITE
ReturnToService=2
"""


def write_conf(folder: Path, site: Site, features: set[str]) -> None:
    """slurm.conf and gres.conf. What a profile does not say, a node of this Slurm has plenty of."""
    lines, gres = [_CONF.format(name=re.sub(r"\W", "", site.name), port=_PORT, folder=folder)], []
    for index, (name, queue) in enumerate(site.queues.items() or [("any", Queue())]):
        nodes = f"q{index}n[1-{NODES}]"
        threads = 2 if queue.cpu_unit == "hwthread" else 1
        cpus = queue.cpus or 128
        count = 8 if queue.gpus is None else queue.gpus
        shape = f"CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus // threads} ThreadsPerCore={threads}"
        shape += f" RealMemory={(queue.mem_gb or 1000) * 1024} State=CLOUD"
        kind = f"{queue.gpu_type}:" if queue.gpu_type else ""
        shape += f" Gres=gpu:{kind}{count}" if count else ""
        shape += f" Feature={','.join(sorted(features))}" if features else ""
        lines.append(f"NodeName={nodes} {shape}\n")
        longest = max((r.walltime_s or 0 for r in queue.limits), default=0)
        limit = f"MaxTime={longest // 60}" if longest else "MaxTime=INFINITE"
        default = "Default=YES " if name == site.queue or not site.queue else ""
        # where the queue is a QOS, or the server chooses, the partition is the site's only one
        lines.append(f"PartitionName={name} Nodes={nodes} {default}{limit} State=UP\n")
        if count:
            kind = f" Type={queue.gpu_type}" if queue.gpu_type else ""
            gres.append(f"NodeName={nodes} Name=gpu{kind} Count={count}\n")
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "gres.conf").write_text("".join(gres))


@contextlib.contextmanager
def controller(state: Path, folder: Path) -> Iterator[None]:
    """A slurmctld with the configuration in `folder`, on the cluster's login host, until the end of the block."""
    there = [*enter(state, "login"), "env", f"SLURM_CONF={folder}/slurm.conf"]
    daemon = subprocess.Popen(
        [*there, "slurmctld", "-D", "-c"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
    )
    try:
        deadline = time.monotonic() + 600
        while b"is UP" not in subprocess.run([*there, "scontrol", "ping"], capture_output=True, cwd="/").stdout:
            assert daemon.poll() is None, (folder / "slurmctld.log").read_text()
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.05)
        yield
    finally:
        # a signal would end nsenter only, outside the namespace
        subprocess.run([*there, "scontrol", "shutdown"], capture_output=True, cwd="/")
        daemon.wait(timeout=600)
