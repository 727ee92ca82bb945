"""What the checks need to know of this host, looked up. Cheap: `hpcddp env` runs it."""

from __future__ import annotations

import os

from hpcddp.checks.check import Machine
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def look_at_machine(env: Mapping[str, str]) -> Machine:
    """This host as this process sees it. Interfaces and plugins are looked up only where a variable names one."""
    import resource

    interfaces = None
    if env.get("NCCL_SOCKET_IFNAME"):
        from hpcddp.ranks.interfaces import list_interfaces

        interfaces = tuple(dict.fromkeys(interface.name for interface in list_interfaces()))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = -1 if limit == resource.RLIM_INFINITY else limit
    plugins = _nccl_plugins(env) if env.get("NCCL_NET") else None
    return Machine(len(os.sched_getaffinity(0)), os.cpu_count(), memlock, _has_infiniband(), interfaces, plugins)


def _nccl_plugins(env: Mapping[str, str]) -> tuple[str, ...]:
    """libnccl-net*.so and librccl-net*.so, where the loader will look for what NCCL opens by name."""
    found: list[str] = []
    for folder in env.get("LD_LIBRARY_PATH", "").split(":"):
        try:
            files = os.listdir(folder) if folder else []
        except OSError:
            continue
        found += [f"{folder}/{f}" for f in files if f.startswith(("libnccl-net", "librccl-net")) and ".so" in f]
    return tuple(found)


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
