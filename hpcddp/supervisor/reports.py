"""Reports of the ranks' agents: which ranks are there, how far they are, and how they ended. `agent.py` is the other
side, and `wire.py` has the messages.

Each agent holds a connection. One that breaks without a last word is a process, or a host, that is gone; one
that is silent is a host that cannot be reached, or one that does not run.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.failure import choose_error, describe_end, format_failure
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
    DISCONNECTED,
    ENDS,
    FALLS_SILENT,
    FIRST_STEP,
    HELD,
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
    describe_stall,
    describe_stand,
    find_late,
)

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
else:
    import _signal as signal

_MOST_STRANGERS = 128  # callers at a time that have not said which rank they are: this process opens files itself, too
_PATIENCE_S = 10.0  # for their first line
_LONGEST = 4096  # bytes of it
_BACK_S = 3.0  # a connection that broke may come again
_REPORT_S = 0.5  # from the first failure: rank 0 may fail with the same words, on the job's output
_CAUSE_S = 5.0  # that a rank which has only seen another one fail stays for that one's words
_MOST_TEXT = 400  # characters of an error
_NAP_S = 1.0  # between two looks, where nothing comes
_DEAF = """\
warning: the ranks were started, and none can call this host: one that hangs, or whose host falls silent, is not seen
hint: let the nodes of a job reach each other on every port, as their training needs it, too"""


class Caller:
    """A connection to this process: anybody's, as of a scan of ports, until it has said which `rank` it is."""

    def __init__(self, connection: socket.socket, since: float) -> None:
        self.connection, self.since = connection, since
        self.incoming = wire.Incoming()
        self.rank: Rank | None = None


class Reports:
    """The ranks of one attempt at a time. `limit_s`: how long ranks may be silent, or make no step, before it is an
    event; 0: for ever. `clock`: seconds, from anywhere."""

    def __init__(self, limit_s: float, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._hang_limits = read_hang_limits(env)
        every_s = min(5.0, limit_s / 8 or 5.0, *(one / 8 for one in self._hang_limits if one is not None))
        self._poll, self._listener = select.epoll(), open_listener()
        self._listener.setblocking(False)
        # one that cannot be let in wakes this process once, and not until it can
        self._poll.register(self._listener.fileno(), select.EPOLLIN | select.EPOLLET)
        port, addresses = self._listener.getsockname()[1], list_addresses(env, os.uname().nodename)
        self._address = wire.Listener(port, os.urandom(16).hex(), every_s, limit_s * 3 / 4, addresses)
        self._strangers: dict[int, Caller] = {}  # by the descriptor: who has not said which rank it is
        self._agents: dict[int, Caller] = {}  # and who has
        self._expect("", "")

    def _expect(self, attempt: str, records: str) -> None:
        """The ranks of this attempt. `records`: the folder in which each that is started leaves a file."""
        self._attempt, self._records = attempt, records
        self._opened = self._awake = self._clock()  # when this process looked last
        self._stuck, self._hang = StuckDetector(self._limit_s), PlainHang(*self._hang_limits)
        self._world_size = self._plain_size = 0  # as the agents say it, and the ranks of a plain script; 0: none has
        self._signals: list[tuple[int, float]] = []  # for the ranks, and since when
        self._is_ending = self._is_deaf = self._is_stalled = False
        self._is_reported = False  # how the first rank has failed
        self.ranks: dict[int, Rank] = {}
        self.events: list[Event] = []
        self.remarks: list[str] = []  # for people
        self.stalls: list[str] = []  # where ranks stand that wait for each other, once each time
        self.stacks: StacksAnswer | None = None  # the ranks have been asked for theirs

    @property
    def entry(self) -> int:
        """The descriptor that is readable when an agent has sent something."""
        return self._poll.fileno()

    @property
    def lost_hosts(self) -> set[str]:
        """Hosts whose ranks are gone or silent."""
        return {event.host for event in self.events if event.kind in {GONE, SILENT}}

    def open(self, attempt: AttemptFolder) -> None:
        """Expect the ranks of this attempt; those of others are to end."""
        self.end_all()
        self._expect(attempt.name, os.path.dirname(attempt.rank_environment(0)))
        with suppress(OSError):
            wire.write_listener(attempt, self._address)

    def read(self) -> None:
        """Read what has come."""
        self._forgive_pause()
        self._accept()
        for number, _ in self._poll.poll(0):
            caller = self._agents.get(number) or self._strangers.get(number)
            if caller is not None:
                self._hear(caller)

    def look(self) -> None:
        """Find what nobody says: who is silent, gone or stuck."""
        self._forgive_pause()
        now = self._clock()
        for caller in [one for one in self._strangers.values() if now - one.since > _PATIENCE_S]:
            self._close(caller)
        self._accept()
        self._find_lost(now, _BACK_S, self._limit_s or float("inf"))
        if self.events and now - self.events[0].at > _REPORT_S:
            self._report_failure()
        if self.is_holding and not self._find_saving_s(now):
            self._let_end()
        if not self.events:
            self._look_for_absent(now)
        if not self.events:
            self._look_for_stuck(now)
        if not self.events:
            self._look_for_hang(now)

    def settle(self) -> None:
        """Judge the ranks at the attempt's end: one that is late with its word may be the cause of it."""
        now = self._clock()
        first = min((event.at for event in self.events), default=now)
        unexplained = bool(self.events) and all(event.is_of_another for event in self.events)
        are_swept = all(event.is_of_another or event.kind == GONE for event in self.events) and any(
            one.state == DISCONNECTED or one.is_noted for one in self.ranks.values()
        )
        self._find_lost(now, -1, 2 * self._address.every_s + _BACK_S)
        for one in self.ranks.values():
            # unfinished: the launcher has ended the others for that status
            if (one.status == 0 and unexplained) or (one.status and one.is_well and are_swept and one.heard <= first):
                self._add(one, LEFT, one.heard)
        self._report_failure(is_over=True)

    def end_all(self) -> None:
        """End every rank at once, also those that still call."""
        self._is_ending = True
        self._let_end()
        self._say_to_all(wire.Kill())

    def close(self) -> None:
        """Hear nobody any more."""
        for caller in (*self._agents.values(), *self._strangers.values()):
            self._close(caller)
        self._listener.close()
        self._poll.close()

    def tell_end(self, at: float) -> None:
        """Tell the ranks that the job ends at another time now, in seconds since 1970."""
        self._say_to_all(wire.Until(at))

    def give(self, number: int) -> None:
        """Give every rank this signal once, also one that calls later."""
        self._signals.append((number, self._clock()))
        for one in self._connected:
            self._give(one, len(self._signals))

    def ask_for_stacks(self, request: str) -> None:
        """Ask every rank that is there; the answers come to `stacks` while this is read."""
        self.stacks = StacksAnswer(request, {one.rank: one.host for one in self.ranks.values() if one.is_there})
        for rank in self.stacks.awaited:
            self._say(self.ranks[rank], wire.Ask(request))

    @property
    def is_holding(self) -> bool:
        """Whether the agent of a rank that has ended waits for ranks that still save."""
        return any(one.state == HELD for one in self.ranks.values())

    @property
    def are_started(self) -> bool:
        """Whether a rank was started, as far as this host can see: each leaves a file there."""
        with suppress(OSError):
            return bool(self.ranks or os.listdir(self._records))
        return False

    @property
    def all_over(self) -> bool:
        """Whether every rank that was seen has ended, or is gone."""
        return all(one.is_over for one in self.ranks.values())

    @property
    def all_well(self) -> bool:
        """Whether every rank has said that it ended well."""
        return len(self.ranks) == self._world_size > 0 and all(one.is_well for one in self.ranks.values())

    # What is found by looking.

    def _forgive_pause(self) -> None:
        """Start all clocks anew where this process did not run itself, as in a job that is suspended: nobody has been
        silent for longer, and the others may run again only after it."""
        now = self._clock()
        paused = now - self._awake > 2 * self._address.every_s + _NAP_S
        self._awake = now
        if paused:
            self._opened = now
            for one in self.ranks.values():
                one.forgive(now)

    def _find_lost(self, now: float, away_s: float, silent_s: float) -> None:
        """Ranks whose connection broke, or that say nothing, for longer than that."""
        for one in self.ranks.values():
            since, heard = one.since, one.heard
            if one.state == DISCONNECTED and now - since > away_s and one.change(STAYS_AWAY, now):
                self._add(one, GONE, since)
            elif one.is_there and now - heard > silent_s and one.change(FALLS_SILENT, now):
                self._add(one, SILENT, heard)

    def _look_for_absent(self, now: float) -> None:
        """Find ranks that are not there long after the launcher was started: all, or some for which the others wait."""
        limit_s = self._limit_s * FIRST_STEP
        if not limit_s or now - self._opened < limit_s:
            return
        if not self.are_started:
            self.events.append(Event(ABSENT, -1, "", now, text=f"no rank was started in {limit_s:.0f} s"))
        elif not self.ranks and not self._is_deaf:
            self._is_deaf = True
            self.remarks.append(_DEAF)
        beats, count = [one.beat for one in self.ranks.values()], len(self.ranks)
        is_waiting = any(beat.looks for beat in beats) and not any(beat.step for beat in beats)
        if is_waiting and count < self._world_size:
            missing = next(rank for rank in range(self._world_size) if rank not in self.ranks)
            text = f"{self._world_size - count} of {self._world_size} ranks were not started in {limit_s:.0f} s"
            text += f", the first of them rank {missing}"
            self.events.append(Event(ABSENT, missing, "", now, text=text))

    def _look_for_stuck(self, now: float) -> None:
        stuck, since, is_sure = self._stuck.find_stuck(self.ranks.values(), now)
        for one in stuck:
            kind, at = (STUCK, since) if one.status is None else (LEFT, one.heard)
            self._add(one, kind, at, describe_stand(one), is_sure=is_sure)

    def _look_for_hang(self, now: float) -> None:
        """Find ranks that wait for each other. Those of hpcddp's runtime print it themselves."""
        ranks, size = self.ranks.values(), max(self._plain_size, self._world_size)
        text, late = self._hang.look(ranks, size, now)
        self.remarks += [text] if text else []
        self.stalls += [text] if text and not late else []
        self._add_late(late, now)
        was_stalled, stall = self._is_stalled, describe_stall(ranks, size, now, *self._hang_limits)
        self._is_stalled = stall != ""
        self.stalls += [stall] if stall and not was_stalled else []

    def _add_late(self, late: list[int], at: float) -> None:
        for rank in late:
            one = next(one for one in self.ranks.values() if rank in one.plain)
            kind = STUCK if one.status is None else LEFT
            text = describe_late(rank, self.ranks.values(), self._clock())
            self._add(one, kind, at, text, is_sure=len(late) == 1, rank=rank)

    def _add(
        self, one: Rank, kind: str, at: float, text: str = "", *, is_sure: bool = True, rank: int | None = None
    ) -> None:
        """`rank`: of an agent's own ranks, the one that it is about."""
        if not one.is_noted:
            one.is_noted = True
            number, status = one.rank if rank is None else rank, one.status or 0
            self.events.append(Event(kind, number, one.host, at, one.beat.step, status, text, is_sure, one.signal))

    def _report_failure(self, *, is_over: bool = False) -> None:
        """Say once, on the job's output, how the rank that failed first has ended, for any program. `is_over`: also one
        that has only seen another fail. Rank 0 may have printed the same words, as with a mistake in the script."""
        cause = find_first_cause(self.events)
        one = self.ranks.get(cause.rank) if cause is not None else None
        if self._is_reported or cause is None or cause.kind not in {ERROR, KILLED} or one is None or one.ended is None:
            return
        if is_over or not cause.is_of_another:
            status, output, log, is_printed, _ = one.ended
            is_above = is_printed or any((event.rank, event.text) == (0, cause.text) for event in self.events)
            failure = format_failure(one.rank, one.host, describe_end(status), output, "" if is_above else log)
            self._is_reported = True
            if not (log or is_printed):  # a refusal, which says all in its two lines
                failure = "\n".join([str(cause), *output.split("\n")[1:]])
            self.remarks.append(failure)

    # The connections.

    def _accept(self) -> None:
        """Let in those that call. An error is of one moment: a caller has vanished, or this process may open no more
        files; the next look tries again."""
        with suppress(OSError):
            while len(self._strangers) < _MOST_STRANGERS:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._strangers[connection.fileno()] = Caller(connection, self._clock())
                self._poll.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        messages = caller.incoming.add(data)
        if caller.rank is None:
            if data and not messages and b"\n" not in data and len(caller.incoming.rest) < _LONGEST:
                return  # its first line is not complete
            self._greet(caller, messages.pop(0) if messages else None)
        one = caller.rank
        if one is None:
            self._close(caller)
        elif self.ranks.get(one.rank) is not one:  # of the attempt before: its last words are no news of this one
            self._say(one, wire.Kill())
            self._leave(one)
        else:
            one.heard = self._clock()
            for message in messages:
                self._take(one, message)
            if not data:
                self._leave(one)

    def _greet(self, caller: Caller, hello: wire.Message | None) -> None:
        """The caller's first line: only who can read the attempt's folder knows the key."""
        if not isinstance(hello, wire.Hello) or hello.key != self._address.key or hello.rank < NO_RANK:
            return
        if hello.attempt != self._attempt:  # left behind by another attempt
            with suppress(OSError):
                caller.connection.send(wire.write(wire.Kill()))
            return
        now = self._clock()
        self._world_size = hello.world_size or self._world_size
        one = self.ranks.setdefault(hello.rank, Rank(hello.rank, hello.host, now))
        self._leave(one)  # an earlier connection of it
        one.caller, caller.rank = caller, one
        number = caller.connection.fileno()
        self._agents[number] = self._strangers.pop(number)
        one.change(CALLS, now)
        self._say(one, wire.Kill() if self._is_ending else wire.Ok())
        for nth in range(1, len(self._signals) + 1):
            self._give(one, nth)

    @property
    def _connected(self) -> list[Rank]:
        """The ranks, also of an attempt before, whose agents are connected."""
        return [caller.rank for caller in self._agents.values() if caller.rank is not None]

    def _say_to_all(self, message: wire.Message) -> None:
        for one in self._connected:
            self._say(one, message)

    def _say(self, one: Rank, message: wire.Message) -> None:
        if one.caller is not None:
            with suppress(OSError):  # one that reads nothing is silent soon
                one.caller.connection.send(wire.write(message))

    def _give(self, one: Rank, nth: int) -> None:
        number, at = self._signals[nth - 1]
        self._say(one, wire.Give(nth, number))
        one.signals |= {number: at, signal.SIGTERM: at}  # that in its place, where the program catches that alone

    def _leave(self, one: Rank) -> None:
        """Close the connection of this rank's agent."""
        if one.caller is not None:
            self._close(one.caller)
            one.caller = None
            one.change(BREAKS, self._clock())

    def _close(self, caller: Caller) -> None:
        number = caller.connection.fileno()
        if self._agents.pop(number, None) or self._strangers.pop(number, None):
            self._poll.unregister(number)
        caller.connection.close()

    # What the agents say.

    def _take(self, one: Rank, message: wire.Message) -> None:
        """Take a message of this rank's agent."""
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
        elif isinstance(message, wire.Ended):
            self._note_end(one, message, now)

    def _note_stacks(self, one: Rank, message: wire.Stacks) -> None:
        """An answer to the last request for stacks; one to an earlier request comes too late."""
        if self.stacks is not None and message.request == self.stacks.request:
            self.stacks.ranks.append(RankStacks(message.rank, one.host, message.text, message.why))
            if not message.left:
                self.stacks.awaited.pop(one.rank, None)

    def _note_end(self, one: Rank, ended: wire.Ended, now: float) -> None:
        one.ended, one.status = ended, read_shell_status(ended.status)
        one.signal = one.find_signal(one.status, now)
        may_hold = bool(one.signal and one.status) and not self._launcher_ends
        if not one.is_well and not self._is_ending:
            self._note_failure(one, ended, now)
        one.change(WAITS_FOR_OTHERS if may_hold else ENDS, now)
        saving_s = self._find_saving_s(now) if may_hold else 0.0
        if saving_s:
            self._say(one, wire.Wait(saving_s))
        elif one.is_noted and all(event.is_of_another and not event.is_clean_up for event in self.events):
            self._say(one, wire.Wait(_CAUSE_S))
        else:
            self._leave(one)
            if one.status:
                self._let_end()  # the launcher ends the others now

    def _note_failure(self, one: Rank, ended: wire.Ended, now: float) -> None:
        text = choose_error(ended.output.split("\n"))[:_MOST_TEXT]
        waited = any(plain.waited is not None for plain in one.plain.values())
        if waited and is_timeout(text):  # of a collective: it had waited for others
            self._add_late(find_late(self.ranks.values(), now), now)
        if ended.unheard_s:
            self._add(one, UNHEARD, now, str(ended.unheard_s))
        else:
            self._add(one, KILLED if os.WIFSIGNALED(one.status or 0) else ERROR, now, text)

    # Ranks that have ended by a signal, and are hidden from the launcher while others save.

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
        for one in self._connected:
            if one.status is not None:
                self._leave(one)


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
