"""How much memory of this host a job may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

#: The controllers of a control group that limits memory, by version 2 and 1 -> its folder, its limit, and what is used.
_GROUPS = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes: what the kernel calls available, and what this process's control groups leave. None: nobody says."""
    found = list[int]()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(root, "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    with suppress(OSError):
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _GROUPS:
                found += _list_left(Path(root, "sys/fs/cgroup"), path, *_GROUPS[controllers])
    return min(found, default=None)


def _list_left(groups: Path, path: str, folder: str, limit: str, used: str) -> list[int]:
    """Of the group and those that hold it: a step's is in its job's."""
    found = list[int]()
    own = Path(groups, folder, path.lstrip("/"))
    for group in (own, *own.parents):
        with suppress(OSError, ValueError):
            found.append(int(Path(group, limit).read_text()) - int(Path(group, used).read_text()))
    return found
