"""What the agents beside the ranks say: which ranks are there, how far they are, and how they ended. `agent.py` is the
other side, and `wire.py` has the messages.

Each agent holds a connection. One that breaks without a last word is a process, or a host, that is gone; one
that is silent is a host that cannot be reached, or one that does not run.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.attempt import choose_error, describe_end, format_failure
from hpcddp.runs.hang import read_hang_limits
from hpcddp.runs.heartbeat import NO_RANK, Beat, Position
from hpcddp.runs.stacks import RankStacks, StacksAnswer
from hpcddp.supervisor import wire
from hpcddp.supervisor.events import (
    ABSENT,
    ERROR,
    GONE,
    KILLED,
    LEFT,
    SILENT,
    STUCK,
    UNHEARD,
    Event,
    find_first_cause,
    is_timeout,
    read_shell_status,
)
from hpcddp.supervisor.rank import (
    BREAKS,
    CALLS,
    ENDS,
    FALLS_SILENT,
    FIRST_STEP,
    HELD,
    LOST,
    MOVES,
    SAVES_S,
    STANDS,
    STAYS_AWAY,
    WAITS_FOR_OTHERS,
    PlainHang,
    PlainRank,
    Rank,
    StuckDetector,
    describe_late,
    describe_stand,
    find_late,
)

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
else:
    import _signal as signal


# The sockets on which the ranks' agents call: on every address of this host, and what they say without waiting.


def allow_more_files(most: int) -> int:
    """Let this process open so many files, one for each rank, as far as its hard limit goes; how many it could before.
    Nothing is changed where it can open as many."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def allow_files(most: int) -> None:
    """The limit of open files that a process started with."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def accept(listener: socket.socket) -> socket.socket | None:
    """Who waits to be heard; None: nobody does. OSError if this process may open no more files."""
    try:
        caller, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    caller.setblocking(False)
    return caller


def receive(connection: socket.socket) -> bytes | None:
    """What has come; empty: the other side has ended; None: nothing has."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


# Who calls the supervisor, until it has said which rank it is: it may be anybody, such as a scan of ports.


_MOST = 128  # at a time: the supervisor opens files itself, too
_PATIENCE_S = 10.0  # for the first line
_DEAF_S = 1.0  # until the next try, after one that failed
_LONGEST = 4096  # bytes of the first line
_READABLE = 1  # EPOLLIN


class Callers:
    """`poll`: becomes readable when somebody calls or says something."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll, self._listener = poll, open_listener()
        self._listener.setblocking(False)
        self._waiting: dict[int, tuple[socket.socket, bytes, float]] = {}  # what has come of its line, since when
        self._deaf_until: float | None = None  # None: the listener is listened to
        poll.register(self._listener.fileno(), _READABLE)

    @property
    def port(self) -> int:
        """Where they call."""
        return int(self._listener.getsockname()[1])

    @property
    def listener(self) -> int:
        """The descriptor that is readable when somebody calls."""
        return self._listener.fileno()

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def accept(self, now: float) -> None:
        """Let in those that call. An error is of one moment: a caller has vanished, or this process may open no more
        files."""
        self._deaf_until = now  # where there are too many
        try:
            while len(self._waiting) < _MOST:
                caller = accept(self._listener)
                if caller is None:
                    self._deaf_until = None
                    return
                self._waiting[caller.fileno()] = caller, b"", now
                self._poll.register(caller.fileno(), _READABLE)
        except OSError:
            self._deaf_until = now + _DEAF_S
        self._poll.unregister(self._listener.fileno())

    def look(self, now: float) -> None:
        """Who says nothing goes, and who could not be let in is."""
        for number, (caller, _, since) in list(self._waiting.items()):
            if now - since > _PATIENCE_S:
                del self._waiting[number]
                self.close(caller)
        if self._deaf_until is not None and now >= self._deaf_until and len(self._waiting) < _MOST:
            self._deaf_until = None
            self._poll.register(self._listener.fileno(), _READABLE)

    def take(self, number: int) -> tuple[socket.socket, wire.Message | None, bytes] | None:
        """Who has said a first line, the message that it is, if it is one, and what came behind it. None: not yet."""
        caller, text, since = self._waiting[number]
        data = receive(caller)
        if data is None:
            return None
        line, found, rest = (text + data).partition(b"\n")
        if data and not found and len(line) < _LONGEST:
            self._waiting[number] = caller, line, since
            return None
        del self._waiting[number]
        return caller, wire.read(line) if found else None, rest

    def close(self, connection: socket.socket) -> None:
        """A connection that was let in is over."""
        with suppress(OSError):
            self._poll.unregister(connection.fileno())
        connection.close()

    def close_all(self) -> None:
        """Let nobody in any more."""
        for caller, _, _ in self._waiting.values():
            caller.close()
        self._listener.close()


# Ranks that nobody has heard of, long after their launcher was started.


def find_absent(ranks: Mapping[int, Rank], world_size: int, waited_s: float, now: float, records: str) -> Event | None:
    """Find ranks that are not there while the launcher waits for a host, or the ranks that are there for the others.
    None: all are there, or those that are do not wait. `world_size`: 0 as long as no rank has said it. `records`: the
    folder in which each rank that is started leaves a file."""
    if not ranks:
        if has_files(records):  # they were started, and cannot call here
            return None
        return Event(ABSENT, -1, "", now, text=f"no rank was started in {waited_s:.0f} s")
    is_waiting = any(one.beat.looks for one in ranks.values()) and not any(one.beat.step for one in ranks.values())
    if not is_waiting or len(ranks) >= (world_size or 1):
        return None
    missing = next(rank for rank in range(world_size) if rank not in ranks)
    text = (
        f"{world_size - len(ranks)} of {world_size} ranks were not started in {waited_s:.0f} s,"
        f" the first of them rank {missing}"
    )
    return Event(ABSENT, missing, "", now, text=text)


def has_files(folder: str) -> bool:
    """Whether ranks were started: each leaves a file there."""
    with suppress(OSError):
        return bool(os.listdir(folder))
    return False


_BACK_S = 3.0  # a connection that broke may come again
_REPORT_S = 0.5  # from the first failure: rank 0 may fail with the same words, on the job's output
_CAUSE_S = 5.0  # that a rank which has only seen another one fail stays for that one's words
_MOST_TEXT = 400  # characters of an error
_NAP_S = 1.0  # between two looks, where nothing comes


class Reports:
    """The ranks of one attempt at a time. `limit_s`: how long ranks may be silent, or make no step, before it is an
    event; 0: for ever. `clock`: seconds, from anywhere."""

    def __init__(self, limit_s: float, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._hang_limits = read_hang_limits(env)
        every_s = min(5.0, limit_s / 8 or 5.0, *(one / 8 for one in self._hang_limits if one is not None))
        self._poll = select.epoll()
        self._callers = Callers(self._poll)
        addresses = list_addresses(env, os.uname().nodename)
        self._address = wire.Listener(self._callers.port, os.urandom(16).hex(), every_s, limit_s * 3 / 4, addresses)
        self._connected: dict[int, Rank] = {}
        self._attempt = ""
        self._stuck = StuckDetector(limit_s)
        self._hang = PlainHang(*self._hang_limits)
        self.remarks: list[str] = []  # for people
        self.stalls: list[str] = []  # where ranks stand that wait for each other, once each time
        self._is_ending = False
        self.is_deaf = False  # ranks were started long ago, and none has called
        self._opened = 0.0
        self._awake = 0.0  # when this process looked last
        self._records = ""  # the folder in which each rank that is started leaves a file
        self._world_size = self._plain_size = 0  # as the agents say it, and the ranks of a plain script; 0: none has
        self.stacks: StacksAnswer | None = None  # the ranks have been asked for theirs
        self._signals: list[tuple[int, float]] = []  # for the ranks of the attempt, and since when
        self.ranks: dict[int, Rank] = {}
        self.events: list[Event] = []
        self._is_reported = False  # how the first rank has failed

    @property
    def entry(self) -> int:
        """What becomes readable when somebody has said something."""
        return self._poll.fileno()

    @property
    def lost_hosts(self) -> set[str]:
        """Where ranks are gone or silent."""
        return {event.host for event in self.events if event.kind in {GONE, SILENT}}

    def open(self, attempt: AttemptFolder) -> None:
        """Expect the ranks of this attempt; those of others are to end."""
        self.end_all()
        self._attempt, self._is_ending, self.is_deaf = attempt.name, False, False
        self._stuck = StuckDetector(self._limit_s)
        self._hang = PlainHang(*self._hang_limits)
        self.ranks, self.events, self.stalls = {}, [], []
        self._is_reported = False
        self._signals = []
        self._world_size = self._plain_size = 0
        self.stacks, self._opened = None, self._clock()
        self._awake = self._opened
        self._records = os.path.dirname(attempt.rank_environment(0))
        with suppress(OSError):
            wire.write_listener(attempt, self._address)

    def read(self) -> None:
        """Read what has come."""
        self._forgive_pause()
        for number, _ in self._poll.poll(0):
            if number == self._callers.listener:
                self._callers.accept(self._clock())
            elif number in self._callers:
                self._greet(number)
            elif number in self._connected:
                self._hear(self._connected[number])

    def look(self) -> None:
        """Find what nobody says: who is silent, gone or stuck."""
        self._forgive_pause()
        now = self._clock()
        self._callers.look(now)
        self._find_lost(now, _BACK_S, self._limit_s or float("inf"))
        if self.events and now - self.events[0].at > _REPORT_S:
            self._report_failure()
        if self.is_holding and not self._find_saving_s(now):
            self._let_end()
        limit_s = self._limit_s * FIRST_STEP
        if limit_s and not self.events and now - self._opened >= limit_s:
            absent = find_absent(self.ranks, self._world_size, limit_s, now, self._records)
            self.events += [absent] if absent is not None else []
            self.is_deaf = not self.ranks and has_files(self._records)
        self._look_for_stuck(now)
        self._look_for_hang(now)

    def settle(self) -> None:
        """Judge the ranks at the attempt's end: one that is late with its word may be the cause of it."""
        now = self._clock()
        first = min((event.at for event in self.events), default=now)
        unexplained = bool(self.events) and all(event.is_of_another for event in self.events)
        are_swept = all(event.is_of_another or event.kind == GONE for event in self.events) and any(
            one.state == LOST or one.is_noted for one in self.ranks.values()
        )
        self._find_lost(now, -1, 2 * self._address.every_s + _BACK_S)
        for one in self.ranks.values():
            # unfinished: the launcher has ended the others for that status
            if (one.status == 0 and unexplained) or (one.status and one.is_well and are_swept and one.heard <= first):
                self._add(one, LEFT, one.heard)
        self._report_failure(is_over=True)

    def _report_failure(self, *, is_over: bool = False) -> None:
        """Say once, on the job's output, how the rank that failed first has ended, for any program. `is_over`: also one
        that has only seen another fail. Rank 0 may have printed the same words, as with a mistake in the script."""
        cause = find_first_cause(self.events)
        one = self.ranks.get(cause.rank) if cause is not None else None
        if self._is_reported or cause is None or cause.kind not in {ERROR, KILLED} or one is None or one.ended is None:
            return
        if is_over or not cause.is_of_another:
            status, output, log, is_printed = one.ended
            is_above = is_printed or any((event.rank, event.text) == (0, cause.text) for event in self.events)
            failure = format_failure(one.rank, one.host, describe_end(status), output, "" if is_above else log)
            self._is_reported = True
            if not (log or is_printed):  # a refusal, which says all in its two lines
                failure = "\n".join([str(cause), *output.split("\n")[1:]])
            self.remarks.append(failure)

    def _find_lost(self, now: float, away_s: float, silent_s: float) -> None:
        """Ranks whose connection broke, or that say nothing, for longer than that."""
        for one in self.ranks.values():
            since, heard = one.since, one.heard
            if one.state == LOST and now - since > away_s and one.change(STAYS_AWAY, now):
                self._add(one, GONE, since)
            elif one.is_there and now - heard > silent_s and one.change(FALLS_SILENT, now):
                self._add(one, SILENT, heard)

    def end_all(self) -> None:
        """End every rank at once, also those that still call."""
        self._is_ending = True
        self._let_end()
        for one in self._connected.values():
            self._say(one, wire.Kill())

    def close(self) -> None:
        """Hear nobody any more."""
        for one in list(self._connected.values()):
            self._leave(one)
        self._callers.close_all()
        self._poll.close()

    def tell_end(self, at: float) -> None:
        """Tell the ranks that the job ends at another time now, in seconds since 1970."""
        for one in self._connected.values():
            self._say(one, wire.Until(at))

    def give(self, number: int) -> None:
        """Give every rank this signal once, also one that calls later."""
        self._signals.append((number, self._clock()))
        for one in self._connected.values():
            self._give(one, len(self._signals))

    def ask_for_stacks(self, request: str) -> None:
        """Ask every rank that is there; the answers come to `stacks` while this is read."""
        self.stacks = StacksAnswer(request, {one.rank: one.host for one in self.ranks.values() if one.is_there})
        for one in self.ranks.values():
            if one.is_there:
                self._say(one, wire.Ask(request))

    @property
    def is_holding(self) -> bool:
        """Whether the agent of a rank that has ended waits for ranks that still save."""
        return any(one.state == HELD for one in self.ranks.values())

    @property
    def are_started(self) -> bool:
        """Whether a rank was started, as far as this host can see."""
        return bool(self.ranks) or has_files(self._records)

    @property
    def all_over(self) -> bool:
        """Whether every rank that was seen has ended, or is gone."""
        return all(one.is_over for one in self.ranks.values())

    @property
    def all_well(self) -> bool:
        """Whether every rank has said that it ended well."""
        return len(self.ranks) == self._world_size > 0 and all(one.is_well for one in self.ranks.values())

    def _forgive_pause(self) -> None:
        """Start all clocks anew where this process did not run itself, as in a job that is suspended, nobody has been
        silent for longer; the others may run again only after it."""
        now = self._clock()
        paused = now - self._awake > 2 * self._address.every_s + _NAP_S
        self._awake = now
        if paused:
            self._opened = now
            for one in self.ranks.values():
                one.forgive(now)

    def _look_for_stuck(self, now: float) -> None:
        stuck, since, is_sure = self._stuck.find_stuck(self.ranks.values(), now)
        for one in stuck if not self.events else ():
            kind, at = (STUCK, since) if one.status is None else (LEFT, one.heard)
            self._add(one, kind, at, describe_stand(one), is_sure=is_sure)

    def _look_for_hang(self, now: float) -> None:
        """Of a plain script, whose ranks do not look themselves."""
        if self.events or not any(one.plain for one in self.ranks.values()):
            return
        text, late = self._hang.look(self.ranks.values(), max(self._plain_size, self._world_size), now)
        self.remarks += [text] if text else []
        self.stalls += [text] if text and not late else []
        self._add_late(late, now)

    def _add_late(self, late: list[int], at: float) -> None:
        for rank in late:
            one = next(one for one in self.ranks.values() if rank in one.plain)
            kind = STUCK if one.status is None else LEFT
            text = describe_late(rank, self.ranks.values(), self._clock())
            self._add(one, kind, at, text, is_sure=len(late) == 1, rank=rank)

    def _greet(self, number: int) -> None:
        """The caller's first line: only who can read the attempt's folder knows the key."""
        taken = self._callers.take(number)
        if taken is None:
            return
        caller, hello, rest = taken
        if not isinstance(hello, wire.Hello) or hello.key != self._address.key or hello.rank < NO_RANK:
            self._callers.close(caller)
            return
        now = self._clock()
        if hello.attempt != self._attempt:  # left behind by another attempt
            with suppress(OSError):
                caller.send(wire.write(wire.Kill()))
            self._callers.close(caller)
            return
        self._world_size = hello.world_size or self._world_size
        one = self.ranks.setdefault(hello.rank, Rank(hello.rank, hello.host, now))
        if one.connection is not None:
            self._leave(one)
        one.connection, one.incoming, one.heard = caller, wire.Incoming(), now
        one.change(CALLS, now)
        self._connected[number] = one
        self._say(one, wire.Kill() if self._is_ending else wire.Ok())
        for nth in range(1, len(self._signals) + 1):
            self._give(one, nth)
        self._take(one, rest)

    def _hear(self, one: Rank) -> None:
        assert one.connection is not None
        data = receive(one.connection)
        if data is None:
            return
        if self.ranks.get(one.rank) is not one:  # of the attempt before: its last words are no news of this one
            self._say(one, wire.Kill())
            self._leave(one)
            return
        one.heard = self._clock()
        self._take(one, data)
        if not data:
            self._leave(one)

    def _take(self, one: Rank, data: bytes) -> None:
        """What this rank's agent says."""
        for message in one.incoming.add(data):
            now = self._clock()
            if isinstance(message, Beat):
                self._stuck.note(one, message, now)
                self._say(one, wire.Kill() if self._is_ending else wire.Ok())
            elif isinstance(message, Position):
                one.place = message
                one.change(STANDS if message.text else MOVES, now)
            elif isinstance(message, wire.PlainStand):
                one.plain.setdefault(message.rank, PlainRank()).note(message.stand, now)
                self._plain_size = message.world_size
            elif isinstance(message, wire.Stacks):
                self._note_stacks(one, message)
            elif isinstance(message, wire.Signalled) and not self._launcher_ends:
                one.signals[message.number] = now
            elif isinstance(message, wire.Unheard):
                one.unheard_s = message.seconds
            elif isinstance(message, wire.Ended):
                self._note_end(one, message, now)

    def _note_stacks(self, one: Rank, message: wire.Stacks) -> None:
        """An answer to the last request for stacks; one to an earlier request comes too late."""
        if self.stacks is not None and message.request == self.stacks.request:
            self.stacks.ranks.append(RankStacks(message.rank, one.host, message.text, message.why))
            if not message.left:
                self.stacks.awaited.pop(one.rank, None)

    def _note_end(self, one: Rank, ended: wire.Ended, now: float) -> None:
        one.status = status = read_shell_status(ended.status)
        one.signal = one.find_signal(status, now)
        may_hold = bool(one.signal and status) and not self._launcher_ends
        one.ended = ended
        if not one.is_well and not self._is_ending:
            kind = KILLED if os.WIFSIGNALED(status) else ERROR
            text = choose_error(ended.output.split("\n"))[:_MOST_TEXT]
            kind, text = (UNHEARD, str(one.unheard_s)) if one.unheard_s else (kind, text)
            waited = any(plain.waited is not None for plain in one.plain.values())
            if waited and is_timeout(text):  # of a collective: it had waited for others
                self._add_late(find_late(self.ranks.values(), now), now)
            self._add(one, kind, now, text)
        one.change(WAITS_FOR_OTHERS if may_hold else ENDS, now)
        saving_s = self._find_saving_s(now) if may_hold else 0.0
        if saving_s:
            self._say(one, wire.Wait(saving_s))
        elif one.is_noted and all(event.is_of_another and not event.is_clean_up for event in self.events):
            self._say(one, wire.Wait(_CAUSE_S))
        else:
            self._leave(one)
            if status:
                self._let_end()  # the launcher ends the others now

    @property
    def _launcher_ends(self) -> bool:
        """Whether the launcher may have seen a rank that did not end well: it sends signals to the others then."""
        known = (event for event in self.events if event.rank not in self.ranks or self.ranks[event.rank].state != HELD)
        return self._is_ending or any(known)

    def _find_saving_s(self, now: float) -> float:
        """How long ranks may still save after a signal by which a rank has ended; 0: none does."""
        held = [one for one in self.ranks.values() if one.state == HELD]
        left = [one for one in self.ranks.values() if one.status is None and not one.is_noted]
        # what came to one rank came to all a moment later, if it was sent to the job
        may_save = any(one.signals for one in left) or any(now - one.heard <= _BACK_S for one in held)
        if not left or not may_save:
            return 0.0
        last = max(at for one in (*left, *held) for at in one.signals.values())
        return max(last + SAVES_S - now, 0.0)

    def _let_end(self) -> None:
        """The agents that wait for others end now."""
        for one in [one for one in self._connected.values() if one.status is not None]:
            self._leave(one)

    def _give(self, one: Rank, nth: int) -> None:
        number, at = self._signals[nth - 1]
        self._say(one, wire.Give(nth, number))
        one.signals |= {number: at, signal.SIGTERM: at}  # that in its place, where the program catches that alone

    def _leave(self, one: Rank) -> None:
        """Its connection is over."""
        if one.connection is None:
            return
        self._connected.pop(one.connection.fileno(), None)
        self._callers.close(one.connection)
        one.connection = None
        one.change(BREAKS, self._clock())

    def _add(
        self, one: Rank, kind: str, at: float, text: str = "", *, is_sure: bool = True, rank: int | None = None
    ) -> None:
        """`rank`: of an agent's own ranks, the one that it is about."""
        if not one.is_noted:
            one.is_noted = True
            number, status = one.rank if rank is None else rank, one.status or 0
            self.events.append(Event(kind, number, one.host, at, one.beat.step, status, text, is_sure, one.signal))

    def _say(self, one: Rank, message: wire.Message) -> None:
        if one.connection is not None:
            with suppress(OSError):  # one that reads nothing is silent soon
                one.connection.send(wire.write(message))
