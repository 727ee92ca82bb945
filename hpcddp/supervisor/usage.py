"""Use of a node by a job: the agent of the node's first rank measures it every ten seconds, in a thread, and appends a
line to the attempt's folder. `runs/usage.py` reads the lines.

The sources are `/proc`, the job's cgroup, and one nvidia-smi that keeps running. What cannot be read is left out: no
rank ever waits for it, or fails by it.
"""

from __future__ import annotations

import _thread
import os
import time
from contextlib import suppress

from hpcddp.processes import list_processes, read_environ, read_stat
from hpcddp.ranks.cgroups import list_cgroups
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import job_of
from hpcddp.schedulers.job_id import parse_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from hpcddp.runs.folder import AttemptFolder

_EVERY_S = 10.0
_FIRST_S = (1.0, 2.0, 7.0, *[_EVERY_S] * 60)  # between the first looks: a short attempt has lines, too
_LATER = 6  # times as long: the later looks, which count so often
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_SMI = ("nvidia-smi", "--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class Processes:
    """The processes of an attempt on this host, by the mark in their environment. Each is asked for that once."""

    def __init__(self, attempt: str) -> None:
        self._mark = f"HPCDDP_ATTEMPT={attempt}".encode()
        self._known: dict[int, bool] = {}  # by its number: whether it belongs to the attempt

    def read(self) -> tuple[float, int, int]:
        """Seconds of the processor that they and those of their children that have ended have used, and their memory,
        in bytes: what is shared counts once for each. And how many CPUs they may use."""
        known = self._known
        self._known = {one: known[one] if one in known else self._mark in read_environ(one) for one in list_processes()}
        ticks = pages = 0
        cpus = set[int]()
        for process in (process for process, is_of_it in self._known.items() if is_of_it):
            if (stat := read_stat(process)) is not None:
                ticks += stat.cpu_ticks
                pages += stat.pages
                with suppress(OSError):
                    cpus |= os.sched_getaffinity(process)
        return ticks / _TICK, pages * _PAGE, len(cpus)


class Cgroup:
    """The memory of the job by its cgroup: the outermost one whose name has the job's number. Without one: nothing."""

    def __init__(self, job: str, **tree: str) -> None:
        self._folder = self._limit_file = self._peak_file = ""
        self._keys: tuple[str, ...] = ()
        for version, folder in list_cgroups("memory", **tree):
            words = os.path.basename(folder).replace("-", "_").replace(".", "_").split("_")
            limit, peak, keys = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", ("total_rss", "total_shmem"))
            if version == 2:
                limit, peak, keys = "memory.max", "memory.peak", ("anon", "shmem")
            if job in words and os.path.exists(f"{folder}/{limit}"):
                self._folder, self._limit_file, self._peak_file, self._keys = folder, limit, peak, keys
                return

    @property
    def is_there(self) -> bool:
        return bool(self._folder)

    def read(self) -> dict[str, int]:
        """`memory`: what its processes hold now, without files that the kernel keeps; `peak`: the most ever, with those
        files; `limit`."""
        found: dict[str, int] = {}
        if self._folder:
            stat = dict(line.split(None, 1) for line in _read(f"{self._folder}/memory.stat").splitlines())
            amounts = [int(stat[key]) for key in self._keys if key in stat]
            found |= {"memory": sum(amounts)} if amounts else {}
            for name, file in (("peak", self._peak_file), ("limit", self._limit_file)):
                text = _read(f"{self._folder}/{file}").strip()
                found |= {name: int(text)} if text.isdecimal() and int(text) < 1 << 60 else {}
        return found


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


class Gpus:
    """The GPUs that nvidia-smi shows here, every ten seconds by one process, which ends when nobody reads it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.each: dict[int, list[Any]] = {}  # name, use in percent, memory used and there, in MiB
        self._rows: list[list[Any]] = []
        self.process = 0
        with suppress(OSError):
            reads, writes = os.pipe()
            nothing = os.open(os.devnull, os.O_RDWR)
            moves = [(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate((nothing, writes, nothing))]
            words = (*_SMI, "-l", str(round(_EVERY_S)))
            path = {name: env[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in env}
            try:
                self.process = os.posix_spawnp(
                    words[0], words, path, file_actions=moves, setsid=True
                )  # no process of the job's
                _thread.start_new_thread(self._listen, (reads,))
            finally:
                os.close(writes)
                os.close(nothing)

    def _listen(self, reads: int) -> None:
        with open(reads, encoding="utf-8", errors="replace") as file:
            latest = 0.0
            for line in file:
                now = time.monotonic()
                self._rows = self._rows if now - latest < _EVERY_S / 4 else []  # the lines of a look come together
                latest = now
                with suppress(ValueError):
                    name, use, used, there = (word.strip() for word in line.split(","))
                    self._rows.append([name, float(use), float(used), float(there)])
                    self.each[len(self._rows) - 1] = self._rows[-1]


class UsageSampler:
    """Looks, and writes. `phases`: seconds of the node's first rank by what it did, as its page has them."""

    def __init__(
        self, attempt: AttemptFolder, host: str, env: Mapping[str, str], phases: Callable[[], list[float]]
    ) -> None:
        self._path, self._phases = attempt.usage(host), phases
        self._host, self._env = host, env
        self._attempt = attempt.name
        self._began = time.monotonic()

    def start(self) -> None:
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        with suppress(Exception):  # a node without /proc, a full disk: nobody needs to know
            self._open()
            for wait_s in _FIRST_S:
                time.sleep(wait_s)
                self._sample(1)
            while True:
                time.sleep(_EVERY_S * _LATER)
                self._sample(_LATER)

    def _open(self) -> None:
        import json  # not before the rank has started

        self._dump = json.dumps
        job = parse_id(job_of(self._attempt))
        self._processes, self._cgroup, self._gpus = Processes(self._attempt), Cgroup(job.number), Gpus(self._env)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _sample(self, looks: int) -> None:
        """Write a line, which counts as so many looks."""
        cpu_s, resident, cpus = self._processes.read()
        memory = {"memory": resident} | self._cgroup.read()
        line = {
            "host": self._host,
            "elapsed_s": round(time.monotonic() - self._began, 1),
            "cpus": cpus,
            "cpu_s": round(cpu_s, 2),
            **memory,
            "gpus": [*self._gpus.each.values()],
            "phases": self._phases(),
            "looks": looks,
            "by": "cgroup" if self._cgroup.is_there else "processes",
            "time": round(time.time(), 1),
        }
        os.write(self._file, f"{self._dump(line)}\n".encode())
