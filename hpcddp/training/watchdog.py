"""Finds where the ranks stand when none gets on: a collective that only some of them call waits for torch's timeout;
and a rank's heartbeat, for its agent.

A thread on each rank looks at the main thread every few seconds. If that has stood at one line for `stall_s`, all
ranks are asked where they stand, and rank 0 prints it. A rank that is busy looks no different from one that waits, so
the text says where each is, and no more. Where all ranks have stood or been quiet for `end_s`, and not at one line,
they cannot meet any more: the job ends with the ranks that the others wait for, before torch's own timeout.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.errors import PEER_FAILED
from hpcddp.guard.hpcddp_stand import NO_WAIT, WAITS, Quiet, count_collectives, describe_frames, find_place, list_frames
from hpcddp.runs.hang import Hang, Stand, find_hang, format_stands, read_hang_limits
from hpcddp.runs.heartbeat import HEARTBEAT_VARIABLE, Page, open_page
from hpcddp.training.activity import is_at_files, waits_for_ranks
from hpcddp.training.rendezvous.failure import Failure, claim_first
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.process_group import open_group
from hpcddp.training.torch_compat import Store, second_connection

_LONGEST_PAUSE_S = 5.0
_HANG = 1  # the status of a rank that others wait for: with max_restarts the job starts again
_EVERY_S = 0.25  # of the heartbeat
_STANDS = 8  # looks without a move, before the thread's place is written
_LEAST_CPU = 0.02  # of the time
_PAST = 8  # looks after the lease's end: a process that was suspended lets its agent be first
_openings = itertools.count()  # a group may see several runtimes
_watching: list[Watchdog] = []  # of this process, the innermost last


def find_stand(frames: list[FrameType], seconds: float, quiet_s: float = 0.0) -> Stand:
    """Find where a thread with these frames stands, and has stood, or been quiet, for so long."""
    line, inside, waits = describe_frames(frames)
    return Stand(line, inside, seconds, waits, count_collectives(), quiet_s)


def print_hang(hang: Hang) -> None:
    """Print a hang from another thread than the main one, which may hold any lock."""
    with suppress(Exception):
        print(f"hpcddp: {hang.error}", file=sys.stderr, flush=True)
        sys.stdout.flush()


@contextmanager
def open_watched_group(env: MutableMapping[str, str], **options: Any) -> Iterator[Group]:
    """As `open_group`, and a hang in the body is named and ended."""
    stall_s, end_s = read_hang_limits(env)
    with open_group(env, **options) as group, ExitStack() as stack:
        if stall_s is not None and group.world_size > 1:
            print_report = partial(print, "hpcddp:", file=sys.stderr, flush=True)
            stack.enter_context(Watchdog(group, stall_s, end_s, lambda: 0, print_report).watching())
        yield group


class Watchdog:
    """The watchdog of one rank. `beats()` grows with each batch. Rank 0 calls `print_report`; where a hang ends the job
    after `end_s` (None: never), rank 0 and the ranks that are missing call `report_hang`."""

    def __init__(
        self,
        group: Group,
        stall_s: float,
        end_s: float | None,
        beats: Callable[[], int],
        print_report: Callable[[str], None],
        report_hang: Callable[[Hang], None] = print_hang,
    ) -> None:
        self._group, self._rank, self._world_size = group, group.rank, group.world_size
        self._stall_s, self._end_s, self._pause_s = stall_s, end_s, min(_LONGEST_PAUSE_S, stall_s / 4)
        self._beats, self._print_report, self._report_hang = beats, print_report, report_hang
        self._store = group.store
        self._second_store: Store | None = None
        self._name = f"stall-{next(_openings)}"  # of this runtime's keys
        self._watched = threading.get_ident()
        self._quiet = Quiet(threading.get_native_id())
        self._batches = 0
        self._end = threading.Event()
        self._answered = 0  # the number of the newest question that this rank has answered

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread."""
        _watching.append(self)
        thread = threading.Thread(target=self._watch, name="hpcddp-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            _watching.remove(self)
            thread.join(_LONGEST_PAUSE_S)  # it may wait for a store whose host is gone

    def _watch(self) -> None:
        try:
            before, since, reached = self._find_progress(), time.monotonic(), 0
            while not self._end.wait(self._pause_s):
                now, moved = self._find_progress(), False
                if now != before or _watching[-1:] != [self]:  # a runtime in this group has its own
                    before, since, moved = now, time.monotonic(), True
                stood_s, quiet_s = time.monotonic() - since, self._measure_quiet()
                stands = stood_s >= self._stall_s / 2
                is_late = self._end_s is not None and max(stood_s, quiet_s) >= self._end_s
                if not (moved or stands):
                    continue
                store = self._connection() if stands or is_late else self._store
                if moved and not is_late:
                    reached = 0
                limits = (stood_s >= self._stall_s) + is_late
                if limits > reached:  # the ranks are asked once at each of the two
                    self._ask(store)
                reached = max(reached, limits, self._answer(store, stood_s, quiet_s))
                if stands or is_late:
                    self._end_if_hung(store)
        except (DistNetworkError, DistStoreError):
            pass  # the host of the store is gone, and with it the run

    def _find_progress(self) -> tuple[object, ...]:
        """Values that change if the watched thread gets on: the count of batches, and the places of all its frames."""
        return (self._beats(), *find_place(list_frames(self._watched)))

    def _measure_quiet(self) -> float:
        """Count the seconds since the watched thread last made a batch, collective, read or write."""
        batches, self._batches = self._batches, self._beats()
        waits = describe_frames(list_frames(self._watched))[2]
        is_alone = waits == NO_WAIT and not waits_for_ranks(self._watched)
        return self._quiet.measure(is_alone=is_alone and batches == self._batches)

    def _connection(self) -> Store:
        """Another connection to the store: the watched thread may wait in a call of the first one, and hold it."""
        if self._second_store is None:
            self._second_store = second_connection(self._store)
        return self._second_store

    def _question(self, store: Store) -> int:
        """The number of the newest question, from 1; 0: there is none."""
        return int(store.get(self._name)) if store.check([self._name]) else 0

    def _ask(self, store: Store) -> None:
        """Ask all ranks where they stand, unless a question is open."""
        if self._question(store) <= self._answered:
            store.compare_set(self._name, str(self._answered) if self._answered else "", str(self._answered + 1))

    def _answer(self, store: Store, stood_s: float, quiet_s: float) -> bool:
        """Answer a new question where this rank stands, if there is one. Rank 0 prints the answers of all."""
        question = self._question(store)
        if question <= self._answered:
            return False
        self._answered = question
        stand = find_stand(list_frames(self._watched), stood_s, quiet_s)
        store.set(f"{self._name}/{question}/{self._rank}", json.dumps(stand))
        if self._rank == 0:
            self._collect(store, [f"{self._name}/{question}/{rank}" for rank in range(self._world_size)])
        return True

    def _collect(self, store: Store, keys: list[str]) -> None:
        """Wait for the answers, which come at the next look, or after half of the time from a rank that stands."""
        end = time.monotonic() + self._stall_s / 2 + 2 * _LONGEST_PAUSE_S
        while not store.check(keys) and time.monotonic() < end and not self._end.wait(self._pause_s):
            pass
        if not self._end.is_set():
            stands = {rank: Stand(*json.loads(store.get(key))) for rank, key in enumerate(keys) if store.check([key])}
            hang = None if self._end_s is None else find_hang(stands, self._world_size, self._end_s)
            if hang is not None:
                store.set(f"{self._name}-hang", json.dumps(hang))
            else:
                self._print_report(format_stands(stands, self._world_size, self._stall_s, self._end_s))

    def _end_if_hung(self, store: Store) -> None:
        """End this process, if rank 0 has found that the ranks cannot meet. Rank 0, which hosts the store, is the
        last."""
        key = f"{self._name}-hang"
        if not store.check([key]):
            return
        hang = Hang(*json.loads(store.get(key)))
        first = hang.ranks[0]
        claim_first(store, Failure(first, self._group.members[first].host, hang.message), self._group.members[0].host)
        end = time.monotonic() + 2 * _LONGEST_PAUSE_S

        def wait(is_so: Callable[[], bool]) -> None:
            while not is_so() and time.monotonic() < end:
                time.sleep(self._pause_s / 4)

        if self._rank == 0:  # it hosts the store, and is the last; its main thread may wake when others leave
            self._report_hang(hang)
            store.set(f"{key}-reported", "")
            wait(lambda: store.add(f"{key}-left", 0) >= self._world_size - 1)
        else:
            wait(lambda: store.check([f"{key}-reported"]))
            if self._rank in hang.ranks:
                self._report_hang(hang)
            store.add(f"{key}-left", 1)
        os._exit(_HANG if self._rank in hang.ranks else PEER_FAILED)


class Heartbeat:
    """Writes to the page of the rank's agent, from then on: the step, and whether the thread that makes it moves, which
    is another step or another place in its frames. Without a page nothing is done.

    A thread that stays at its place and uses the processor may work or wait: a loop without end does, and one that
    waits for a GPU. That is written, too, and that the process is at a checkpoint's files, where one call may wait for
    the disk for minutes. One that waits in a collective does none of these; one whose GPU works may do none either, so
    that the limit has to be long.
    """

    def __init__(self, page: Page | None) -> None:
        self._step: Callable[[], int] = int  # 0
        self._move_end: Callable[[float], None] | None = None
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._over = threading.Event()
        self._moves = self._looks = self._uses = self._past = 0
        self._is_place_written = False
        self._beats = threading.Thread(target=self._beat, name="hpcddp-pulse", daemon=True)
        if page is not None:
            self._page = page
            self._beats.start()

    def follow(self, step: Callable[[], int], move_end: Callable[[float], None]) -> None:
        """Write the optimizer steps so far, `step()`, until `stop`. `move_end`: called where the job ends at another
        time."""
        self._step, self._move_end = step, move_end

    def stop(self) -> None:
        """Write the last step; the rank leaves."""
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
            self._looks = 0
            self._write_beat()

    def _beat(self) -> None:
        before, used_s = find_place(list_frames(self._thread)), time.clock_gettime(self._clock)
        stood = 0
        while not self._over.wait(_EVERY_S):
            place, now_s = find_place(list_frames(self._thread)), time.clock_gettime(self._clock)
            self._looks += 1
            moved = place != before
            self._moves += moved
            self._uses += not moved and (now_s - used_s > _EVERY_S * _LEAST_CPU or is_at_files())
            before, used_s = place, now_s
            stood = 0 if moved else stood + 1
            self._write_beat()
            if stood == _STANDS or (moved and self._is_place_written):
                self._write_place(stands=stood == _STANDS)
            self._read_page()

    def _read_page(self) -> None:
        with suppress(OSError, ValueError):
            if self._move_end is not None and (end := self._page.read_end()) is not None:
                self._move_end(end)
            until = self._page.read_lease()
            self._past = self._past + 1 if until is not None and time.monotonic() > until else 0
            if self._past > _PAST:
                os.kill(os.getpid(), signal.SIGKILL)  # another attempt may have begun: this one writes no more

    def _write_beat(self) -> None:
        with suppress(OSError):
            self._page.write(self._step(), self._moves, self._looks, self._uses)

    def _write_place(self, *, stands: bool) -> None:
        self._is_place_written, stand = stands, Stand()
        if stands:
            line, inside, waits = describe_frames(list_frames(self._thread))
            stand = Stand(line, inside, waits=WAITS if waits_for_ranks(self._thread) else waits)
        with suppress(OSError, ValueError):
            self._page.write_place(stand)


@contextmanager
def beating(env: Mapping[str, str]) -> Iterator[Heartbeat]:
    """Beat in the body, if anybody listens."""
    heartbeat = Heartbeat(open_page(env.get(HEARTBEAT_VARIABLE)))
    try:
        yield heartbeat
    finally:
        heartbeat.stop()
