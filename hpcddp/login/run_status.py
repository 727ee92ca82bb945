"""The status of a run: the record that is shown, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpcddp.record import Record

#: A job in one of these states has not ended.
LIVE = ("queued", "held", "running", "suspended", "exiting", "moved", "unknown")
#: Of these, one that has not begun.
WAITS = ("queued", "held")


class RunStatus(Record):
    """One run. `state`: queued, held, running, suspended, exiting, unfinished, finished, failed, cancelled, ended
    (however: nobody says), or unknown.
    `links`: jobs of its chain so far, and of how many at most (0: no chain). `starts`: when its waiting job may start,
    seconds since 1970. `ends`: the end of its running job. `left_s`: to the end of the training. `point`: its values in
    a sweep. `best`: what it named its best, by `best_mode`; `best_run` and `jobs`, how many are in which
    state, and `size`, how many it was made of, of a sweep. `sweep`: the folder of the one that it belongs to. `why`:
    why it waits, or ended."""

    name: str
    path: str
    state: str
    job: str = ""
    links: tuple[int, int] = (0, 0)
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    starts: int | None = None
    ends: int | None = None
    why: str = ""
    point: str = ""
    is_sweep: bool = False
    best: float | None = None
    best_mode: str = ""
    best_run: str = ""
    jobs: Mapping[str, int] = MappingProxyType({})
    size: int = 0
    sweep: str = ""
    exit_status: int | None = None
    weights_sha256: str | None = None
    exact: Mapping[str, object] | None = None


class Statuses(Record):
    """`problems`: what could not be found out. `is_damaged`: a run's own files are the reason."""

    runs: tuple[RunStatus, ...]
    problems: tuple[str, ...] = ()
    is_damaged: bool = False
