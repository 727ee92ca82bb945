"""How much memory of this host a job may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes: what the kernel calls available, and what this process's control group leaves. None: nobody says."""
    found = list[int]()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(root, "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    with suppress(OSError):
        own = Path(root, "proc/self/cgroup").read_text().strip().rpartition("0::/")[2].splitlines()[0:1]
        group = Path(root, "sys/fs/cgroup", *own)
        for folder in (group, *group.parents):  # a step's group is in its job's
            with suppress(OSError, ValueError):
                used = int(Path(folder, "memory.current").read_text())
                found.append(int(Path(folder, "memory.max").read_text()) - used)
    return min(found, default=None)
