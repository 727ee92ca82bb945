"""The control groups that a process is in."""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_cgroups(
    controller: str, root: str = "/sys/fs/cgroup", table: str = "/proc/self/cgroup"
) -> Iterator[tuple[int, str]]:
    """The version (1 or 2) and folder of each control group that may bound what this controller counts, the outermost
    first."""
    with suppress(OSError), open(table, encoding="utf-8", errors="replace") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):  # "": version 2
                continue
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts) + 1):
                yield 1 if controllers else 2, os.path.join(root, controllers, *parts[:depth])
