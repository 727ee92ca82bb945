"""What the agents beside the ranks tell: which ranks are there, how far they are, and how they ended. `agent.py` is the
other side and has the words of a message.

Each agent holds a connection. One that breaks without a last word is a process, or a host, that is gone; one
that is silent is a host that cannot be reached, or one that does not run.
"""

from __future__ import annotations

import _socket
import os
import select
import time
from contextlib import suppress

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import list_interfaces
from hpcddp.ranks.reach import own_address
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.heartbeat import NO_RANK, Beat, Supervised, write_supervised
from hpcddp.supervisor.events import ABSENT, ERROR, GONE, KILLED, LEFT, SILENT, STUCK, UNHEARD, Event, read_shell_status
from hpcddp.supervisor.stuck import FIRST_STEP, SAVES_S, RankReport, StuckDetector, describe_stand

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
else:
    import _signal as signal


# The sockets on which the ranks' agents call: on every address of this host, and what they say without waiting.


_MOST_WAITING = 4096  # connections; the kernel may allow fewer


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


def open_listener() -> _socket.socket:
    """On a port that the kernel chooses. It does not block."""
    has_ipv6 = _has_ipv6()
    listener = _socket.socket(_socket.AF_INET6 if has_ipv6 else _socket.AF_INET, _socket.SOCK_STREAM)
    if has_ipv6:
        listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
    listener.bind(("", 0))
    listener.listen(_MOST_WAITING)
    listener.setblocking(False)
    return listener


def accept(listener: _socket.socket) -> _socket.socket | None:
    """Who waits to be heard; None: nobody does. OSError if this process may open no more files."""
    try:
        number, _ = listener._accept()  # type: ignore[attr-defined]  # typeshed has it under socket alone
    except (BlockingIOError, ConnectionAbortedError):
        return None
    caller = _socket.socket(fileno=number)
    caller.setblocking(False)
    return caller


def receive(connection: _socket.socket) -> bytes | None:
    """What has come; empty: the other side has ended; None: nothing has."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _has_ipv6() -> bool:
    with suppress(OSError):
        probe = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM)
        probe.close()
        return True
    return False


def own_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """What other hosts may call this one: by the site's recipe first."""
    found = list[str]()
    with suppress(LaunchError):
        found.append(own_address(env, os.uname().nodename))
    found += [one.address for one in list_interfaces() if one.is_up and one.is_global]
    return tuple(dict.fromkeys(found)) or ("127.0.0.1",)


# Who calls the supervisor, until it has said which rank it is: it may be anybody, such as a scan of ports.


_MOST = 128  # at a time: the supervisor opens files itself, too
_PATIENCE_S = 10.0  # for the first line
_DEAF_S = 1.0  # until the next try, after one that failed
_LONGEST = 4096  # bytes of the first line
_READABLE = 1  # EPOLLIN


class Callers:
    """`poll`: becomes readable when somebody calls or says something."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll, self._own = poll, open_listener()
        self._waiting: dict[int, tuple[_socket.socket, bytes, float]] = {}  # what has come of its line, since when
        self._deaf_until: float | None = None  # None: the listener is listened to
        self._is_full = False  # deaf only until one of those let in is gone
        poll.register(self._own.fileno(), _READABLE)

    @property
    def port(self) -> int:
        """Where they call."""
        return int(self._own.getsockname()[1])

    @property
    def listener(self) -> int:
        """The descriptor that is readable when somebody calls."""
        return self._own.fileno()

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def accept(self, now: float) -> None:
        """Those that call. An error is of one moment: a caller has vanished, or this process may open no more files."""
        try:
            while not self._is_full:
                caller = accept(self._own)
                if caller is None:
                    return
                self._waiting[caller.fileno()] = caller, b"", now
                self._poll.register(caller.fileno(), _READABLE)
                self._is_full = len(self._waiting) >= _MOST
        except OSError:
            pass
        self._poll.unregister(self._own.fileno())
        self._deaf_until = now + _DEAF_S

    def look(self, now: float) -> None:
        """Who says nothing goes, and who could not be let in is."""
        for number, (caller, _, since) in list(self._waiting.items()):
            if now - since > _PATIENCE_S:
                self._forget(number)
                self.close(caller)
        if self._deaf_until is not None and now >= self._deaf_until and len(self._waiting) < _MOST:
            self._listen()

    def take(self, number: int) -> tuple[_socket.socket, list[str], bytes] | None:
        """The words of this caller's first line, and what came behind it; no words: it said none. None: not yet."""
        caller, begun, since = self._waiting[number]
        came = receive(caller)
        if came is None:
            return None
        line, found, rest = (begun + came).partition(b"\n")
        if came and not found and len(line) < _LONGEST:
            self._waiting[number] = caller, line, since
            return None
        self._forget(number)
        return caller, line.decode(errors="replace").split() if found else [], rest

    def _forget(self, number: int) -> None:
        del self._waiting[number]
        if self._is_full:
            self._listen()

    def _listen(self) -> None:
        self._deaf_until, self._is_full = None, False
        self._poll.register(self._own.fileno(), _READABLE)

    def close(self, connection: _socket.socket) -> None:
        """A connection that was let in is over."""
        with suppress(OSError):
            self._poll.unregister(connection.fileno())
        connection.close()

    def close_all(self) -> None:
        """Nobody is let in any more."""
        for caller, _, _ in self._waiting.values():
            caller.close()
        self._own.close()


# Ranks that nobody has heard of, long after their launcher was started.


def find_absent(
    ranks: Mapping[int, RankReport], world_size: int, waited_s: float, now: float, records: str
) -> Event | None:
    """A launcher may wait for a host for ever, and the ranks that are there for those that are not. None: all are
    there, or those that are do not wait. `world_size`: 0 as long as no rank has said it. `records`: the folder in which
    each rank that is started leaves a file."""
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


_WISHES = (signal.SIGTERM, signal.SIGINT)  # to end the job
_LEAST_SAVES_S = 30.0  # that ranks get to save after one has failed behind a signal that is no such wish
_BACK_S = 3.0  # a connection that broke may come again
_NAP_S = 1.0  # between two looks, where nothing comes


class Reports:
    """Of one attempt at a time. `limit_s`: how long ranks may be silent, or make no step, before it is an event; 0: for
    ever. `clock`: seconds, from anywhere."""

    def __init__(self, limit_s: float, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        every_s = min(5.0, limit_s / 8) if limit_s else 5.0
        self._poll = select.epoll()
        self._callers = Callers(self._poll)
        self._told = Supervised(self._callers.port, os.urandom(16).hex(), every_s, limit_s * 3 / 4, own_names(env))
        self._connected: dict[int, RankReport] = {}
        self._attempt = ""
        self._stuck = StuckDetector(limit_s)
        self._is_ending = False
        self.is_deaf = False  # ranks were started long ago, and none has called
        self._opened = 0.0
        self._awake = 0.0  # when this process looked last
        self._records = ""  # the folder in which each rank that is started leaves a file
        self._world_size = 0  # as the ranks say it; 0: none has
        self._given: list[tuple[int, float]] = []  # signals for the ranks of the attempt, and since when
        self.ranks: dict[int, RankReport] = {}
        self.events: list[Event] = []

    @property
    def entry(self) -> int:
        """What becomes readable when somebody has said something."""
        return self._poll.fileno()

    @property
    def lost_hosts(self) -> set[str]:
        """Where ranks are gone or silent."""
        return {event.host for event in self.events if event.kind in {GONE, SILENT}}

    def open(self, attempt: AttemptFolder) -> None:
        """The ranks of this attempt are started next; those of others are told to end."""
        self.end_all()
        self._attempt, self._is_ending, self.is_deaf = attempt.name, False, False
        self._stuck = StuckDetector(self._limit_s)
        self.ranks, self.events = {}, []
        self._given = []
        self._world_size, self._opened = 0, self._clock()
        self._awake = self._opened
        self._records = os.path.dirname(attempt.rank_environment(0))
        with suppress(OSError):
            write_supervised(attempt, self._told)

    def read(self) -> None:
        """Whatever has come."""
        self._forgive_pause()
        for number, _ in self._poll.poll(0):
            if number == self._callers.listener:
                self._callers.accept(self._clock())
            elif number in self._callers:
                self._greet(number)
            elif number in self._connected:
                self._hear(self._connected[number])

    def look(self) -> None:
        """What nobody says: who is silent, gone or stuck."""
        self._forgive_pause()
        now = self._clock()
        self._callers.look(now)
        for one in self.ranks.values():
            if one.left and now - one.left > _BACK_S:
                self._add(one, GONE, one.left)
            elif self._limit_s and one.connection and not one.is_held and now - one.heard > self._limit_s:
                self._add(one, SILENT, one.heard)
        if self.is_holding and not self._find_saving_s(now):
            self._let_end()
        limit_s = self._limit_s * FIRST_STEP
        if limit_s and not self.events and now - self._opened >= limit_s:
            absent = find_absent(self.ranks, self._world_size, limit_s, now, self._records)
            self.events += [absent] if absent is not None else []
            self.is_deaf = not self.ranks and has_files(self._records)
        self._look_for_stuck(now)

    def settle(self) -> None:
        """The attempt ends, for what is known: a rank that is late with its word may be the cause of it."""
        now = self._clock()
        first = min((event.at for event in self.events), default=now)
        unexplained = bool(self.events) and all(event.is_of_another for event in self.events)
        are_swept = all(event.is_of_another or event.kind == GONE for event in self.events) and any(
            one.left or one.is_told for one in self.ranks.values()
        )
        for one in self.ranks.values():
            if one.left:
                self._add(one, GONE, one.left)
            elif one.status == 0 and unexplained:
                self._add(one, LEFT, one.heard)
            elif one.status and one.is_well and are_swept and one.heard <= first:
                self._add(one, LEFT, one.heard)  # the launcher has ended the others for that status
            elif one.connection and not one.is_held and now - one.heard > 2 * self._told.every_s + _BACK_S:
                self._add(one, SILENT, one.heard)

    def end_all(self) -> None:
        """Every rank is to end at once; what still calls is told the same."""
        self._is_ending = True
        self._let_end()
        for one in self._connected.values():
            self._say(one, "end")

    def close(self) -> None:
        """Nobody is heard any more."""
        for one in list(self._connected.values()):
            self._leave(one)
        self._callers.close_all()
        self._poll.close()

    def tell_end(self, at: float) -> None:
        """The job's end is another one now, in seconds since 1970."""
        for one in self._connected.values():
            self._say(one, f"until {at}")

    def give(self, number: int) -> None:
        """Every rank gets this signal once, also one that calls later."""
        self._given.append((number, self._clock()))
        for one in self._connected.values():
            self._give(one, len(self._given))

    @property
    def is_holding(self) -> bool:
        """Whether the agent of a rank that has ended waits for ranks that still save."""
        return any(one.is_held for one in self.ranks.values())

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
        """Where this process did not run itself, as in a job that is suspended, nobody has been silent for longer; the
        others may run again only after it."""
        now = self._clock()
        paused = now - self._awake > 2 * self._told.every_s + _NAP_S
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

    def _greet(self, number: int) -> None:
        """The caller's first line: only who can read the attempt's folder knows the key."""
        taken = self._callers.take(number)
        if taken is None:
            return
        caller, words, rest = taken
        is_greeting = len(words) == 6 and words[:2] == ["hello", self._told.key]
        if not is_greeting or not (words[3] == str(NO_RANK) or words[3].isdecimal()) or not words[4].isdecimal():
            self._callers.close(caller)
            return
        _, _, attempt, rank, world_size, host = words
        now = self._clock()
        if attempt != self._attempt:  # left behind by another attempt
            with suppress(OSError):
                caller.send(b"end\n")
            self._callers.close(caller)
            return
        self._world_size = int(world_size) or self._world_size
        one = self.ranks.setdefault(int(rank), RankReport(int(rank), host, now))
        if one.connection is not None:
            self._leave(one)
        one.connection, one.begun, one.left, one.heard = caller, rest, 0.0, now
        self._connected[number] = one
        self._say(one, "end" if self._is_ending else "ok")
        for nth in range(1, len(self._given) + 1):
            self._give(one, nth)
        self._read_lines(one)

    def _hear(self, one: RankReport) -> None:
        assert one.connection is not None
        came = receive(one.connection)
        if came is None:
            return
        if self.ranks.get(one.rank) is not one:  # of the attempt before: its last words are no news of this one
            self._say(one, "end")
            self._leave(one)
            return
        one.begun += came
        one.heard = self._clock()
        self._read_lines(one)
        if not came:
            self._leave(one)

    def _read_lines(self, one: RankReport) -> None:
        *lines, one.begun = one.begun.split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split()
            with suppress(ValueError, IndexError):
                if words[0] == "beat":
                    self._note_beat(one, Beat(*map(int, words[1:5]), *map(int, words[6:7])), is_stopped=words[5] == "1")
                elif words[0] == "at":
                    one.place = bytes.fromhex(words[1].strip("-")).decode(errors="replace")
                elif words[0] == "came" and not self._launcher_ends:
                    one.signals[int(words[1])] = self._clock()
                elif words[0] == "unheard":
                    one.unheard_s = int(words[1])
                elif words[0] == "ended":
                    self._note_end(one, int(words[1]), bytes.fromhex(words[2].strip("-")).decode(errors="replace"))

    def _note_beat(self, one: RankReport, beat: Beat, *, is_stopped: bool) -> None:
        self._stuck.note(one, beat, self._clock())
        one.is_stopped = is_stopped
        self._say(one, "end" if self._is_ending else "ok")

    def _note_end(self, one: RankReport, status: int, text: str) -> None:
        now = self._clock()
        one.status = status = read_shell_status(status)
        one.signal = one.find_signal(status, now)
        may_hold = bool(one.signal and status) and not self._launcher_ends
        if not one.is_well and not self._is_ending:
            kind = KILLED if os.WIFSIGNALED(status) else ERROR
            kind, text = (UNHEARD, str(one.unheard_s)) if one.unheard_s else (kind, text)
            self._add(one, kind, now, text)
        saving_s = self._find_saving_s(now) if may_hold else 0.0
        if saving_s:
            self._say(one, f"wait {saving_s:.0f}")
        else:
            self._leave(one)
            if status:
                self._let_end()  # the launcher ends the others now

    @property
    def _launcher_ends(self) -> bool:
        """Whether the launcher may have seen a rank that did not end well: it sends signals to the others then."""
        seen = (event for event in self.events if event.rank not in self.ranks or not self.ranks[event.rank].is_held)
        return self._is_ending or any(seen)

    def _find_saving_s(self, now: float) -> float:
        """How long ranks may still save after a signal that a rank has ended by; 0: none does. What came to one rank
        came to all a moment later, if it was sent to the job."""
        ended = [one for one in self.ranks.values() if one.is_held]
        left = [one for one in self.ranks.values() if one.status is None and not one.is_told]
        if not left or not (any(one.signals for one in left) or any(now - one.heard <= _BACK_S for one in ended)):
            return 0.0
        until = max(at for one in (*left, *ended) for at in one.signals.values()) + SAVES_S
        for one in ended:
            if one.status and not one.is_well and one.signal not in _WISHES and os.WIFEXITED(one.status):
                # its program may have saved at the signal, trained on and failed: the others would wait for it
                until = min(until, one.heard + max(one.heard - one.signals[one.signal], _LEAST_SAVES_S))
        return max(until - now, 0.0)

    def _let_end(self) -> None:
        """The agents that wait for others end now."""
        for one in [one for one in self._connected.values() if one.is_held]:
            self._leave(one)

    def _give(self, one: RankReport, nth: int) -> None:
        number, at = self._given[nth - 1]
        self._say(one, f"signal {nth} {number}")
        one.signals |= {number: at, signal.SIGTERM: at}  # that in its place, where the program catches that alone

    def _leave(self, one: RankReport) -> None:
        """Its connection is over."""
        if one.connection is None:
            return
        self._connected.pop(one.connection.fileno(), None)
        self._callers.close(one.connection)
        one.connection = None
        if one.status is None:
            one.left = self._clock()

    def _add(self, one: RankReport, kind: str, at: float, text: str = "", *, is_sure: bool = True) -> None:
        if not one.is_told:
            one.is_told = True
            status = one.status or 0
            self.events.append(Event(kind, one.rank, one.host, at, one.beat.step, status, text, is_sure, one.signal))

    def _say(self, one: RankReport, line: str) -> None:
        if one.connection is not None:
            with suppress(OSError):  # one that reads nothing is silent soon
                one.connection.send(f"{line}\n".encode())
