"""Live evidence about who started this process: its parents, and whether its PMI socket is open.

Only for the process itself, never for a recorded environment. Containers (PID namespaces) and hidepid mounts may hide
the parents; then there is no evidence, which is not evidence of the contrary.
"""

from __future__ import annotations

import os
import stat

from hpcddp.ranks.innermost import Evidence
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping


def gather_evidence(env: Mapping[str, str]) -> Evidence:
    """What /proc and PMI_FD show about this very process."""
    chain = parents()
    evidence = weigh(chain, pmi_socket_is_open(env))
    if "srun" not in evidence.nearest:
        return evidence
    daemon = next(pid for pid, name in chain if name in LAUNCHERS["srun"].programs)
    return evidence._replace(slurm_shell=_slurm_shell(daemon))


def weigh(chain: list[tuple[int, str]], pmi_open: bool | None) -> Evidence:
    """The evidence in a chain of parents, (pid, command name) nearest first."""
    nearest: frozenset[str] = frozenset()
    seen: set[str] = set()
    parent = ""
    for pid, name in chain:
        keys = frozenset(key for key, row in LAUNCHERS.items() if name in row.programs)
        if keys and not nearest:
            nearest, parent = keys, f"{name}, pid {pid}"
        seen |= keys
    return Evidence(nearest, parent, frozenset(seen), pmi_open)


def _slurm_shell(daemon: int) -> str:
    """`4711.batch` where this slurmstepd runs a shell and no task of a step; else, and where its title is hidden, "".

    It names itself `slurmstepd: [4711.batch]`, `[4711.interactive]`, and for tasks `[4711.0]` (seen with Slurm 22.05).
    """
    try:
        with open(f"/proc/{daemon}/cmdline", encoding="utf-8", errors="replace") as file:
            step = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
    return step if step.rpartition(".")[2] in {"batch", "interactive", "extern"} else ""


def launcher_pid() -> int | None:
    """The process that started the ranks of this node: the nearest launcher among the parents."""
    for pid, name in parents():
        if any(name in row.programs for row in LAUNCHERS.values()):
            return pid
    return None


def parents() -> list[tuple[int, str]]:
    """(pid, command name) of this process's ancestors, nearest first, as far as /proc shows them."""
    chain: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 0 and len(chain) < 64:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                # "pid (name) state ppid …"; the name may hold blanks and brackets itself, so the last bracket counts.
                before, _, after = file.read().rpartition(")")
            chain.append((pid, before.partition("(")[2]))
            pid = int(after.split()[1])
        except (OSError, ValueError, IndexError):
            break
    return chain


def pmi_socket_is_open(env: Mapping[str, str]) -> bool | None:
    """Whether `PMI_FD` names an open socket of this process; a dead one is an outer launcher's. None: no PMI_FD."""
    number = read_number(env.get("PMI_FD", ""))
    if number is None:
        return None
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except (OSError, OverflowError):  # closed, or no descriptor's number
        return False
