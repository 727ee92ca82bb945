"""What Linux says of a process: its state, its parent, its environment."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import Record


class Stat(Record):
    """`/proc/N/stat`. `name`: of its program, 15 characters at most."""

    name: str
    state: str  # R, S, D, T, Z, …
    parent: int
    session: int
    cpu_ticks: int  # that it and those of its children that have ended have used
    started: str  # in clock ticks since the system did
    pages: int  # of memory


def read_stat(process: int) -> Stat | None:
    """Read what the kernel counts of a process; None: there is no such process."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/stat", "rb") as file:
        # "pid (name) state parent …"; a name may hold blanks and brackets itself, so the last bracket counts
        before, _, after = file.read().decode(errors="replace").rpartition(")")
        fields = after.split()
        ticks = sum(map(int, fields[11:15]))
        name, parent, session = before.partition("(")[2], int(fields[1]), int(fields[3])
        return Stat(name, fields[0], parent, session, ticks, fields[19], int(fields[21]))
    return None


def read_environ(process: int) -> frozenset[bytes]:
    """Its variables at its start, each as `NAME=value`; none of another user's process, or one that has ended."""
    with suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
        return frozenset(file.read().split(b"\0"))
    return frozenset()


def read_argv(process: int) -> list[str]:
    """The words that it was started with, or its title where it has changed that; none of one that has ended."""
    with suppress(OSError), open(f"/proc/{process}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
        return file.read().split("\0")
    return []


def list_processes() -> list[int]:
    """The numbers of all processes that can be seen from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def start_time(process: int) -> str:
    """When this process started, in clock ticks since the system did; "" if there is no such process, or it is dead."""
    stat = read_stat(process)
    return "" if stat is None or stat.state in "ZX" else stat.started


def find_machine() -> str:
    """Which system's process numbers these are: `<boot id> <process namespace>`; "": not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_lives(process: int, started: str, host: str, machine: str) -> bool | None:
    """Whether a process of this host and machine lives, which started at this time ("": not known); None if that cannot
    be seen from here."""
    here = find_machine()
    if not machine or not here:
        return None
    if machine == here:
        now = start_time(process)
        if not started:
            return None if now else False
        return now == started
    # the same kernel: another process namespace, which cannot be looked into; another one: the host has started anew
    return False if host == os.uname().nodename and machine.split()[0] != here.split()[0] else None
