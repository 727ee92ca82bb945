"""What can happen to a rank, done to the process that asks for it."""

import errno
import os
import signal
import subprocess
import time

PATH = os.environ["PATH"]


def refuse(_file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def take_too_much() -> None:
    root = "/sys/fs/cgroup"
    v1 = os.path.isdir(f"{root}/memory")
    name = f"hpcddp-{os.path.basename(os.getcwd())}"  # hosts share it, and process ids are a host's own
    group = f"{root}/memory/{name}" if v1 else f"{root}/{name}"
    os.makedirs(group, exist_ok=True)  # of a test that was killed
    for file, value in (("memory.limit_in_bytes" if v1 else "memory.max", 64 << 20), ("cgroup.procs", os.getpid())):
        with open(f"{group}/{file}", "w") as written:
            written.write(str(value))
    bytes(1 << 30).replace(b"\0", b"x")


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
        back = ["sh", "-c", "ip link set eth0 down; sleep 40; ip link set eth0 up"]
        subprocess.Popen(back, env={"PATH": PATH}, start_new_session=True)  # it outlives the rank
    elif kind == "save":  # the next one
        os.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "full":  # the disk, when the next checkpoint is written
        os.fsync = refuse
    elif kind == "daemon":  # Slurm's alone: what it has started lives on
        subprocess.run(["pkill", "-9", "-x", "slurmd"], check=True)
    elif kind == "proxy":  # mpirun's daemon on this host alone, of Open MPI 5, 4, MPICH and Intel MPI
        daemons = "prted|orted|hydra_pmi_proxy|hydra_bstrap_proxy"
        subprocess.run(["pkill", "-9", "-f", f"(^|/)({daemons}) "], check=True)
    elif kind == "memory":  # what the kernel ends when a job takes more than it may
        take_too_much()
    elif kind == "companion":
        os.kill(os.getppid(), signal.SIGKILL)
