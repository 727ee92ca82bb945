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
    for key in evidence.nearest:
        row = LAUNCHERS[key]
        daemon = next(pid for pid, name in chain if name in row.programs)
        if row.step is not None and row.step.find_shell(daemon):
            return evidence._replace(shell_of=key)
    return evidence


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


def launcher_pid() -> int | None:
    """The process that started the ranks of this node: the nearest launcher among the parents."""
    for pid, name in parents():
        if any(name in row.programs for row in LAUNCHERS.values()):
            return pid
    return None


def launcher_option(programs: tuple[str, ...], option: str) -> str:
    """The value of an option of the nearest of these programs among the parents; "" where it cannot be seen."""
    pid = next((pid for pid, name in parents() if name in programs), None)
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
            words = file.read().split("\0")
        return words[words.index(option) + 1]
    except (OSError, ValueError, IndexError):
        return ""


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
