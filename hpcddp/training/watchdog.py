"""Where the ranks stand, once no rank gets on: a collective that only some of them call waits for torch's timeout.

A thread on each rank looks at the main thread every few seconds. If that has stood at one line for `stall_s`, all
ranks are asked where they stand, and rank 0 prints it. A rank that is busy looks no different from one that waits, so
the text says where each is, and no more. Where all ranks have stood for `end_s`, and not at one line, they cannot meet
any more: the job ends with the ranks that the others wait for, before torch's own timeout of 10 or 30 minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.errors import PEER_FAILED, RequestError
from hpcddp.runs.heartbeat import MAY_WAIT, OWN, WAITS
from hpcddp.training.arguments import read_seconds_or_off
from hpcddp.training.rendezvous.failure import Failure
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.process_group import open_group
from hpcddp.training.torch_compat import Store, second_connection
from hpcddp.uncaught import describe_line, is_library

DEFAULT_STALL_S = 60.0
DEFAULT_END_S = 600.0
_LONGEST_PAUSE_S = 5.0
_COLLECTIVES = "torch.distributed"
_NO_COLLECTIVES = ("torch.distributed.checkpoint", "torch.distributed.tensor")
#: Where a thread waits or computes: the backward pass, in which DDP's buckets are reduced; operators of a DTensor;
#: a GPU whose collective does not end.
_MAY_WAIT_IN = ("torch.autograd", "torch._ops", "torch.cuda", "torch.distributed.tensor")
_MAY_WAIT_CALL = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(\)")  # of a work handle, or of a GPU's tensor
_openings = itertools.count()  # a group may see several runtimes
_watching: list[Watchdog] = []  # of this process, the innermost last


class Stand(NamedTuple):
    """Where a rank's main thread is: the innermost line of the user's own code, and the code that it called there."""

    line: str  # `train.py:41, in evaluate: total = rt.sum(total)`
    inside: str  # what that line is in, the innermost function: `barrier`; empty: nothing
    seconds: float  # how long it has stood there; 0: it gets on
    waits: int = OWN  # whether it waits for other ranks, as `runs.heartbeat` has it

    def __str__(self) -> str:
        return f"{self.line} (in {self.inside})" if self.inside else self.line


def find_stand(frame: FrameType, seconds: float) -> Stand:
    """From the innermost frame of a thread. A thread that runs none of the user's code stands at its innermost line."""
    found: FrameType | None = frame
    while found is not None and is_library(found.f_code.co_filename):
        found = found.f_back
    inside = "" if found is None or found is frame else frame.f_code.co_name
    line = describe_line((found or frame).f_code, (found or frame).f_lineno)
    return Stand(line, inside, seconds, judge_wait(frame.f_globals.get("__name__", "") if inside else "", line))


def judge_wait(module: str, line: str) -> int:
    """Whether a thread that stands in this module, which this line of the user's own has called ("": nothing of
    Python's), waits for other ranks: collectives of torch and of FSDP do."""
    if module.startswith(_COLLECTIVES) and not module.startswith(_NO_COLLECTIVES):
        return WAITS
    return MAY_WAIT if module.startswith(_MAY_WAIT_IN) or (not module and _MAY_WAIT_CALL.search(line)) else OWN


def list_places(frame: FrameType | None) -> list[int]:
    """Of this frame and all that have called it: another list means that its thread has got on."""
    found = list[int]()
    while frame is not None:
        found += id(frame), frame.f_lasti
        frame = frame.f_back
    return found


class Hang(NamedTuple):
    """Ranks that all stand, at different lines: those that the others wait for, and what is so in two lines."""

    ranks: list[int]
    message: str
    hint: str

    @property
    def error(self) -> RequestError:
        return RequestError(self.message, self.hint)


def print_hang(hang: Hang) -> None:
    """From beside the main thread, which may hold any lock."""
    with suppress(Exception):
        print(f"hpcddp: {hang.error}", file=sys.stderr, flush=True)
        sys.stdout.flush()


def read_limits(env: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Seconds without progress after which the ranks' places are printed, and after which a hang ends the job. None:
    never. RequestError for what is no number."""
    stall_s = read_seconds_or_off(env, "HPCDDP_WATCHDOG", DEFAULT_STALL_S)
    return stall_s, read_seconds_or_off(env, "HPCDDP_WATCHDOG_END", DEFAULT_END_S)


@contextmanager
def open_watched_group(env: MutableMapping[str, str], **options: Any) -> Iterator[Group]:
    """As `open_group`, and a hang in the body is named and ended."""
    stall_s, end_s = read_limits(env)
    with open_group(env, **options) as group, ExitStack() as stack:
        if stall_s is not None and group.world_size > 1:
            say = partial(print, "hpcddp:", file=sys.stderr, flush=True)
            stack.enter_context(Watchdog(group, stall_s, end_s, lambda: 0, say).watching())
        yield group


def find_hang(stands: dict[int, Stand], world_size: int, end_s: float) -> Hang | None:
    """None if a rank gets on or has given no answer, or all stand at one line."""
    at: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        at.setdefault(str(stand), []).append(rank)
    if len(stands) < world_size or len(at) < 2 or min(stand.seconds for stand in stands.values()) < end_s:
        return None
    own = [rank for rank, stand in stands.items() if stand.waits == OWN]
    ranks = sorted(own) if 0 < len(own) < world_size else min(at.values(), key=len)
    missing = "; ".join(f"{name_ranks(some)} at {line}" for line, some in at.items() if some[0] in ranks)
    others = "; ".join(f"{name_ranks(some)} at {line}" for line, some in at.items() if some[0] not in ranks)
    return Hang(
        ranks,
        f"the ranks have waited for each other for {end_s:g} s, at different lines: {missing}. The others: {others}",
        "let every rank come to the same calls in the same order; HPCDDP_WATCHDOG_END=3600 waits longer, off for ever",
    )


def format_stands(stands: dict[int, Stand], world_size: int, stall_s: float, end_s: float | None = None) -> str:
    """The report: ranks at the same line together, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        moves = "" if stand.seconds else "; it gets on"
        groups.setdefault(f"{stand}{moves}", []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in stands]
    if silent:
        groups["no answer"] = silent
    lines = [f"  {name_ranks(ranks)}  {line}" for line, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))]
    return "\n".join(
        [
            f"no progress for {stall_s:g} s. The ranks stand at:",
            *lines,
            "  nothing is ended"
            + (f" before {end_s:g} s (HPCDDP_WATCHDOG_END)" if end_s is not None else "")
            + "; a collective that some ranks never call ends at torch's own timeout",
        ]
    )


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, span)) for span in spans)


class Watchdog:
    """One rank's. `beats()` is a number that grows with each batch; `say` prints the report, on rank 0; `tell` says, on
    rank 0 and on those that are missing, that a hang ends the job after `end_s` (None: never)."""

    def __init__(
        self,
        group: Group,
        stall_s: float,
        end_s: float | None,
        beats: Callable[[], int],
        say: Callable[[str], None],
        tell: Callable[[Hang], None] = print_hang,
    ) -> None:
        self._group = group
        self._end_s = end_s
        self._tell = tell
        self._rank, self._world_size = group.rank, group.world_size
        self._store = group.store
        self._own_store: Store | None = None
        self._name = f"stall-{next(_openings)}"  # of this runtime's keys
        self._stall_s = stall_s
        self._pause_s = min(_LONGEST_PAUSE_S, stall_s / 4)
        self._beats = beats
        self._say = say
        self._watched = threading.get_ident()
        self._end = threading.Event()
        self._answered = 0  # the number of the question

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
            before, since, was_told, was_late = self._look(), time.monotonic(), False, False
            while not self._end.wait(self._pause_s):
                if _watching[-1:] != [self]:  # a runtime in this group has its own
                    since = time.monotonic()
                    continue
                now, stood_s = self._look(), time.monotonic() - since
                if now != before:
                    before, since, was_told, was_late = now, time.monotonic(), False, False
                    self._answer(self._store, 0.0)
                elif stood_s >= self._stall_s / 2:
                    store = self._connection()
                    if stood_s >= self._stall_s and not was_told:
                        self._ask(store)
                    if self._end_s is not None and stood_s >= self._end_s and not was_late:
                        was_late = True
                        self._ask(store)
                    was_told = self._answer(store, stood_s) or was_told
                    self._end_if_told(store)
        except (DistNetworkError, DistStoreError):
            pass  # the host of the store is gone, and with it the run

    def _look(self) -> tuple[object, ...]:
        """What changes if the watched thread gets on: the count of batches, and the places of all its frames."""
        return (self._beats(), *list_places(self._frame()))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched)

    def _connection(self) -> Store:
        """Another connection to the store: the watched thread may wait in a call of the first one, and hold it."""
        if self._own_store is None:
            self._own_store = second_connection(self._store)
        return self._own_store

    def _question(self, store: Store) -> int:
        """The number of the newest question, from 1; 0: nobody has asked yet."""
        return int(store.get(self._name)) if store.check([self._name]) else 0

    def _ask(self, store: Store) -> None:
        """Ask all ranks where they stand, unless a question is open."""
        if self._question(store) <= self._answered:
            store.compare_set(self._name, str(self._answered) if self._answered else "", str(self._answered + 1))

    def _answer(self, store: Store, stood_s: float) -> bool:
        """If there is a new question: say where this rank stands. Rank 0 prints what all have said."""
        question = self._question(store)
        if question <= self._answered:
            return False
        self._answered = question
        frame = self._frame()
        if frame is not None:
            store.set(f"{self._name}/{question}/{self._rank}", json.dumps(find_stand(frame, stood_s)))
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
                self._say(format_stands(stands, self._world_size, self._stall_s, self._end_s))

    def _end_if_told(self, store: Store) -> None:
        """End this process, if rank 0 has found that the ranks cannot meet. Rank 0, which hosts the store, is the
        last."""
        key = f"{self._name}-hang"
        if not store.check([key]):
            return
        hang = Hang(*json.loads(store.get(key)))
        first = hang.ranks[0]
        failure = Failure(first, self._group.members[first].host, hang.message)
        store.compare_set("failure", "", json.dumps(failure))
        end = time.monotonic() + 2 * _LONGEST_PAUSE_S
        if self._rank == 0:  # it hosts the store, and is the last; its main thread may wake when others leave
            self._tell(hang)
            store.set(f"{key}-told", "")
            while store.add(f"{key}-left", 0) < self._world_size - 1 and time.monotonic() < end:
                time.sleep(self._pause_s / 4)
        else:
            while not store.check([f"{key}-told"]) and time.monotonic() < end:
                time.sleep(self._pause_s / 4)
            if self._rank in hang.ranks:
                self._tell(hang)
            store.add(f"{key}-left", 1)
        os._exit(hang.error.exit_code if self._rank in hang.ranks else PEER_FAILED)
