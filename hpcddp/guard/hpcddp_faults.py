"""Two faults of torch that end a rank by chance, kept from it: one at its end, one where an agent starts it again."""

from __future__ import annotations

import atexit
import os
import sys
import time

import hpcddp_guard  # type: ignore[import-not-found]  # this folder is on the path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_GLOO_THREADS = "pt_gloo_runloop"  # what torch calls them, by 2.14 at the latest; 2.6 gave them no name
_GLOO_TIMEOUT_S = 5.0


def let_gloo_end() -> None:
    """Wait, before Python ends, until no thread of gloo's runs; for 5 s at most.

    Such a thread gives a collective's tensors back after it has told the program that the collective is done. One that
    comes to this while Python ends is stopped inside of C++: "terminate called without an active exception", SIGABRT.
    """
    if "torch.distributed" not in sys.modules:
        return
    deadline = time.monotonic() + _GLOO_TIMEOUT_S
    rounds_asleep = 0  # several, for a thread that waits for Python's lock sleeps too, until this one gives it away
    while rounds_asleep < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        rounds_asleep = 0 if "R" in _states() else rounds_asleep + 1


def _states() -> list[str]:
    """Of gloo's threads, as the kernel writes them: R if it runs. Where they have no name, of all but this one."""
    named, others = [], []
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:  # no Linux
        return []
    for number in numbers:
        try:
            with open(f"/proc/self/task/{number}/stat", encoding="utf-8") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:  # it has ended
            continue
        if name == _GLOO_THREADS:
            named.append(rest[0])
        elif int(number) != os.getpid():  # Python ends in the first thread
            others.append(rest[0])
    return named or others


def part_attempts(module: ModuleType, restarts: str) -> None:
    """Give the ranks of an agent's second attempt names of their own in the agent's store, which is that of the first.

    The addresses of the first attempt are still there. A rank that reads one before its owner has written the new one
    connects to a process that is gone: "Gloo connectFullMesh failed", "Connection refused". Torch counts on a new store
    for each attempt, which its agent makes with --rdzv-backend=c10d only.
    """
    make = getattr(module, "_create_c10d_store", None)
    if make is None:
        return

    def make_for_attempt(*words: Any, **options: Any) -> Any:
        return sys.modules["torch.distributed"].PrefixStore(f"attempt-{restarts}", make(*words, **options))

    module._create_c10d_store = make_for_attempt  # type: ignore[attr-defined]  # torch's own name: looked for above


def start() -> None:
    """Do both where they are needed."""
    atexit.register(let_gloo_end)  # the first to be registered is called last
    *_, uses_store, restarts = hpcddp_guard.agents_words()
    if restarts not in ("", "0") and uses_store == "True":
        hpcddp_guard.AtImport("torch.distributed.rendezvous", lambda module: part_attempts(module, restarts)).begin()
