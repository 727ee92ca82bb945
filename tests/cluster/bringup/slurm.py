"""A Slurm on the hosts: slurmctld and munged on login, slurmd on every node. No systemd, no accounting, no cgroups.

The nodes claim 16 CPUs and 8 GPUs each, whatever the machine has: enough to give every option of srun something to do.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from bringup.hosts import enter

CPUS, GPUS = 16, 8
_CLEAN = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]

_CONF = """\
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={state}/slurmctld
SlurmdSpoolDir={state}/slurmd/%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
# no cgroup hierarchy of our own to track or bind processes with
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# believe the CPU count below, not the machine
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
# a busy machine may take long to answer, and to save before it is killed
KillWait=100
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=300
SlurmdTimeout=3600
# jobs stop by the end time that they are told; that a busy machine lets them do it late is not their fault
OverTimeLimit=10
JobRequeue=1
# finished jobs stay visible to scontrol
MinJobAge=3600
NodeName=node[1-{nodes}] CPUs={cpus} Boards=1 SocketsPerBoard=2 CoresPerSocket={cores} ThreadsPerCore=1 \
RealMemory=16000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def write_conf(state: Path, nodes: int, net: str = "v4") -> None:
    """What will be /etc/slurm on every host."""
    conf = state / "slurm"
    for folder in (conf, state / "slurmctld", state / "slurmd", state / "dev"):
        folder.mkdir()
    text = _CONF.format(state=state, nodes=nodes, cpus=CPUS, cores=CPUS // 2, gpus=GPUS)
    ipv6 = "CommunicationParameters=EnableIPv6,DisableIPv4\n" if net == "v6" else ""
    (conf / "slurm.conf").write_text(text + ipv6)
    # A GPU is a character device to Slurm: with plain files it would never set CUDA_VISIBLE_DEVICES.
    for index in range(GPUS):
        (state / "dev" / f"nvidia{index}").symlink_to("/dev/null")
    (conf / "gres.conf").write_text(f"NodeName=node[1-{nodes}] Name=gpu File={state}/dev/nvidia[0-{GPUS - 1}]\n")


def up_slurm(state: Path, nodes: int) -> None:
    """Start munge and Slurm on hosts that are up, and wait until every node is idle."""
    key = state / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"socket": "/run/munge/munge.socket.2", "pid-file": "/run/slurm/munged.pid", "key-file": key}
    files |= {"log-file": state / "log" / "munged.log", "seed-file": state / "munge.seed"}
    _start(state, "login", ["munged", "--force", *(f"--{name}={path}" for name, path in files.items())])
    _start(state, "login", ["slurmctld", "-c"])
    for index in range(1, nodes + 1):
        _start(state, f"node{index}", ["slurmd"])
    deadline = time.monotonic() + 300
    while (idle := _count_idle(state)) != nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{idle} of {nodes} nodes are idle after 30 s; the logs are in {state}/log")
        time.sleep(0.05)


def _start(state: Path, host: str, daemon: list[str]) -> None:
    done = subprocess.run([*enter(state, host), *_CLEAN, *daemon], cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{daemon[0]} did not start on {host}: {done.stdout}{done.stderr}; logs: {state}/log")


def _count_idle(state: Path) -> int:
    sinfo = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run([*enter(state, "login"), *_CLEAN, *sinfo], cwd="/", capture_output=True, text=True)
    return len(done.stdout.split())
