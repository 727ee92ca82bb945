"""Reports of the ranks' agents: which ranks are there, how far they are, and how they ended. `agent.py` is the other
side, and `wire.py` has the messages.

Each agent holds a connection. One that breaks without the message of the rank's end is a process, or a host, that is
gone; one that is silent is a host that cannot be reached, or one that does not run.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from hpcddp.ranks.reach import list_addresses, open_listener
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.failure import choose_error, describe_end, format_failure
from hpcddp.runs.hang import Stand, read_hang_limits
from hpcddp.runs.heartbeat import NO_RANK, Beat
from hpcddp.runs.stacks import RankStacks, StacksAnswer
from hpcddp.supervisor import events, wire
from hpcddp.supervisor.rank import (
    BREAKS,
    CALLS,
    DEFERRED,
    DEFERS,
    DISCONNECTED,
    ENDS,
    FALLS_SILENT,
    FIRST_STEP,
    MOVES,
    SAVES_S,
    STANDS,
    STAYS_AWAY,
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

_PATIENCE_S = 10.0  # for the first line of a caller
_BACK_S = 3.0  # a connection that broke may come again
_REPORT_S = 0.5  # from the first failure: rank 0 may fail with the same words, on the job's output
_CAUSE_S = 5.0  # that an agent stays whose rank failed after another one, until that one has reported its error
_MOST_TEXT = 400  # characters of an error
_NAP_S = 1.0  # between two looks, where nothing comes


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
        self._address = wire.SupervisorAddress(port, os.urandom(16).hex(), every_s, limit_s * 3 / 4, addresses)
        self._callers: dict[int, Caller] = {}  # by the descriptor
        self._expect("", "")

    def _expect(self, attempt: str, records: str) -> None:
        self._attempt, self._records = attempt, records
        self._opened = self._awake = self._clock()  # when this process looked last
        self._stuck, self._hang = StuckDetector(self._limit_s), PlainHang(*self._hang_limits)
        self._world_size = self._plain_size = 0  # as the agents say it, and the ranks of a plain script; 0: none has
        self._signals: list[tuple[int, float]] = []  # for the ranks, and since when
        self._is_ending = self._is_stalled = False
        self._is_reported = False  # how the first rank has failed
        self.ranks: dict[int, Rank] = {}
        self.events: list[events.Event] = []
        self.remarks: list[str] = []  # to print
        self.stalls: list[str] = []  # where ranks stand that wait for each other, once each time
        self.stacks: StacksAnswer | None = None  # the ranks have been asked for theirs

    @property
    def entry(self) -> int:
        return self._poll.fileno()

    @property
    def lost_hosts(self) -> set[str]:
        return {event.host for event in self.events if event.kind in {events.GONE, events.SILENT}}

    def open(self, attempt: AttemptFolder) -> None:
        """Expect the ranks of this attempt; those of others are to end."""
        self.end_all()
        self._expect(attempt.name, os.path.dirname(attempt.rank_environment(0)))
        with suppress(OSError):
            wire.write_supervisor_address(attempt, self._address)

    def read(self) -> None:
        self._forgive_pause()
        self._accept()
        for number, _ in self._poll.poll(0):
            if number in self._callers:
                self._receive(self._callers[number])

    def check(self) -> None:
        """Find the ranks that are silent, gone, stuck or absent."""
        self._forgive_pause()
        now = self._clock()
        for caller in [*self._callers.values()]:
            if caller.rank is None and now - caller.since > _PATIENCE_S:
                self._close(caller)
        self._accept()
        self._find_lost(now, _BACK_S, self._limit_s or float("inf"))
        if self.events and now - self.events[0].at > _REPORT_S:
            self._report_failure()
        if self.is_deferring and not self._find_saving_s(now):
            self._let_end()
        for find in (self._find_absent, self._find_stuck, self._find_hang):
            if not self.events:
                find(now)

    def finish(self) -> None:
        """Judge the ranks at the attempt's end: one whose last message is late may be the cause of it."""
        unexplained = bool(self.events) and all(event.is_of_another for event in self.events)
        self._find_lost(self._clock(), -1, 2 * self._address.every_s + _BACK_S)
        for one in self.ranks.values():
            if one.status == 0 and unexplained:
                self._add_event(one, events.LEFT, one.heard)
        self._report_failure(is_over=True)

    def end_all(self) -> None:
        self._is_ending = True
        self._let_end()
        for one in self._connected:
            self._send(one, wire.Kill())

    def close(self) -> None:
        for caller in [*self._callers.values()]:
            self._close(caller)
        self._listener.close()
        self._poll.close()

    def send_end(self, at: float) -> None:
        """Send the job's new end, in seconds since 1970."""
        for one in self._connected:
            self._send(one, wire.Until(at))

    def give(self, number: int) -> None:
        self._signals.append((number, self._clock()))
        for one in self._connected:
            self._give(one, len(self._signals))

    def ask_for_stacks(self, request: str) -> None:
        """Ask every rank that is there; the answers come to `stacks` while this is read."""
        self.stacks = StacksAnswer(request, {one.rank: one.host for one in self.ranks.values() if one.is_there})
        for rank in self.stacks.awaited:
            self._send(self.ranks[rank], wire.Ask(request))

    @property
    def is_deferring(self) -> bool:
        return bool(self._deferred)

    @property
    def are_started(self) -> bool:
        """Whether a rank was started, as far as this host can see: each leaves a file there."""
        with suppress(OSError):
            return bool(self.ranks or os.listdir(self._records))
        return False

    @property
    def all_over(self) -> bool:
        return all(one.is_over for one in self.ranks.values())

    @property
    def all_well(self) -> bool:
        """Whether every rank has reported that it ended well."""
        return len(self.ranks) == self._world_size > 0 and all(one.is_well for one in self.ranks.values())

    # ---- what no rank reports

    def _forgive_pause(self) -> None:
        """Start all clocks anew where this process did not run itself, as in a job that is suspended: nobody has been
        silent for longer, and the others may run again only after it."""
        now = self._clock()
        paused = now - self._awake > 2 * self._address.every_s + _NAP_S
        self._awake = now
        if paused:
            self._opened = now
            for one in self.ranks.values():
                one.restart_clocks(now)

    def _find_lost(self, now: float, away_s: float, silent_s: float) -> None:
        for one in self.ranks.values():
            since, heard = one.since, one.heard
            if one.state == DISCONNECTED and now - since > away_s and one.change(STAYS_AWAY, now):
                self._add_event(one, events.GONE, since)
            elif one.is_there and now - heard > silent_s and one.change(FALLS_SILENT, now):
                self._add_event(one, events.SILENT, heard)

    def _find_absent(self, now: float) -> None:
        limit_s = self._limit_s * FIRST_STEP
        if limit_s and now - self._opened >= limit_s and not self.are_started:
            self.events.append(events.Event(events.ABSENT, -1, "", now, text=f"no rank was started in {limit_s:.0f} s"))

    def _find_stuck(self, now: float) -> None:
        blocking, since, is_sure = self._stuck.find_blocking(self.ranks.values(), now)
        for one in blocking:
            kind, at = (events.STUCK, since) if one.status is None else (events.LEFT, one.heard)
            self._add_event(one, kind, at, describe_stand(one), is_sure=is_sure)

    def _find_hang(self, now: float) -> None:
        """Find ranks that wait for each other. Those of hpcddp's runtime print it themselves."""
        ranks, size = self.ranks.values(), max(self._plain_size, self._world_size)
        text, late = self._hang.check(ranks, size, now)
        self.remarks += [text] if text else []
        self.stalls += [text] if text and not late else []
        self._add_late(late, now)
        was_stalled, stall = self._is_stalled, describe_stall(ranks, size, now, *self._hang_limits)
        self._is_stalled = stall != ""
        self.stalls += [stall] if stall and not was_stalled else []

    def _add_late(self, late: list[int], at: float) -> None:
        for rank in late:
            one = next(one for one in self.ranks.values() if rank in one.plain)
            kind = events.STUCK if one.status is None else events.LEFT
            text = describe_late(rank, self.ranks.values(), self._clock())
            self._add_event(one, kind, at, text, is_sure=len(late) == 1, rank=rank)

    def _add_event(
        self, one: Rank, kind: str, at: float, text: str = "", *, is_sure: bool = True, rank: int | None = None
    ) -> None:
        """Add an event of a rank that has none yet. `rank`: which one, where its agent has several (torchrun)."""
        if not one.has_event:
            one.has_event = True
            number, status = one.rank if rank is None else rank, one.status or 0
            self.events.append(
                events.Event(kind, number, one.host, at, one.beat.step, status, text, is_sure, one.signal)
            )

    def _report_failure(self, *, is_over: bool = False) -> None:
        """Print once, on the job's output, how the rank that failed first has ended. `is_over`: also one that failed
        because another had. Rank 0 may have printed the same words, as with a mistake in the script."""
        cause = events.find_first_cause(self.events)
        if self._is_reported or cause is None or cause.kind not in {events.ERROR, events.KILLED}:
            return
        ended = self.ranks[cause.rank].ended if cause.rank in self.ranks else None
        if ended is None or (cause.is_of_another and not is_over):
            return
        self._is_reported = True
        if ended.log or ended.is_printed:
            is_above = ended.is_printed or any((event.rank, event.text) == (0, cause.text) for event in self.events)
            how, log = describe_end(ended.status), "" if is_above else ended.log
            self.remarks.append(format_failure(cause.rank, cause.host, how, ended.output, log))
        else:  # a refusal, which says all in its two lines
            self.remarks.append("\n".join([str(cause), *ended.output.split("\n")[1:]]))

    # ---- connections

    def _accept(self) -> None:
        with suppress(OSError):  # nobody calls any more; or of one moment, as where too many files are open
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._callers[connection.fileno()] = Caller(connection, self._clock())
                self._poll.register(connection.fileno(), select.EPOLLIN)

    def _receive(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        messages = caller.incoming.add(data)
        if caller.rank is None:
            if data and not messages and b"\n" not in data:
                return  # its first line is not complete
            self._identify(caller, messages.pop(0) if messages else None)
        one = caller.rank
        if one is None:
            self._close(caller)
        elif self.ranks.get(one.rank) is not one:  # of the attempt before
            self._send(one, wire.Kill())
            self._disconnect(one)
        else:
            one.heard = self._clock()
            for message in messages:
                self._record(one, message)
            if not data:
                self._disconnect(one)

    def _identify(self, caller: Caller, hello: wire.Message | None) -> None:
        """Read a caller's first line: only who can read the attempt's folder knows the key."""
        if not isinstance(hello, wire.Hello) or hello.key != self._address.key or hello.rank < NO_RANK:
            return
        if hello.attempt != self._attempt:  # left behind by another attempt
            with suppress(OSError):
                caller.connection.send(wire.write(wire.Kill()))
            return
        now = self._clock()
        self._world_size = hello.world_size or self._world_size
        one = self.ranks.setdefault(hello.rank, Rank(hello.rank, hello.host, now))
        self._disconnect(one)  # an earlier connection of it
        one.caller, caller.rank = caller, one
        one.change(CALLS, now)
        self._send(one, wire.Kill() if self._is_ending else wire.Ok())
        for nth in range(1, len(self._signals) + 1):
            self._give(one, nth)

    @property
    def _connected(self) -> list[Rank]:
        return [caller.rank for caller in self._callers.values() if caller.rank is not None]

    def _send(self, one: Rank, message: wire.Message) -> None:
        if one.caller is not None:
            with suppress(OSError):  # one that reads nothing is silent soon
                one.caller.connection.send(wire.write(message))

    def _give(self, one: Rank, nth: int) -> None:
        number, at = self._signals[nth - 1]
        self._send(one, wire.Give(nth, number))
        one.signals |= {number: at, signal.SIGTERM: at}  # that in its place, where the program catches that alone

    def _disconnect(self, one: Rank) -> None:
        if one.caller is not None:
            self._close(one.caller)
            one.caller = None
            one.change(BREAKS, self._clock())

    def _close(self, caller: Caller) -> None:
        number = caller.connection.fileno()
        if self._callers.pop(number, None):
            self._poll.unregister(number)
        caller.connection.close()

    # ---- messages of the agents

    def _record(self, one: Rank, message: wire.Message) -> None:
        now = self._clock()
        if isinstance(message, Beat):
            self._stuck.record(one, message, now)
            self._send(one, wire.Kill() if self._is_ending else wire.Ok())
        elif isinstance(message, Stand):
            one.place = message
            one.change(STANDS if message.line else MOVES, now)
        elif isinstance(message, wire.PlainStand):
            one.plain.setdefault(message.rank, PlainRank()).record(message.stand, now)
            self._plain_size = message.world_size
        elif isinstance(message, wire.Stacks):
            self._record_stacks(one, message)
        elif isinstance(message, wire.Signalled) and not self._launcher_ends:
            one.signals[message.number] = now
        elif isinstance(message, wire.Ended):
            self._record_end(one, message, now)

    def _record_stacks(self, one: Rank, message: wire.Stacks) -> None:
        if self.stacks is not None and message.request == self.stacks.request:
            self.stacks.ranks.append(RankStacks(message.rank, one.host, message.text, message.why))
            if not message.left:
                self.stacks.awaited.pop(one.rank, None)

    def _record_end(self, one: Rank, ended: wire.Ended, now: float) -> None:
        one.ended, one.status = ended, events.read_shell_status(ended.status)
        one.signal = one.find_signal(one.status, now)
        may_defer = bool(one.signal and one.status) and not self._launcher_ends
        if not one.is_well and not self._is_ending:
            self._record_failure(one, ended, now)
        one.change(DEFERS if may_defer else ENDS, now)
        saving_s = self._find_saving_s(now) if may_defer else 0.0
        if saving_s:
            self._send(one, wire.Wait(saving_s))
        elif one.has_event and all(event.is_of_another and not event.is_clean_up for event in self.events):
            self._send(one, wire.Wait(_CAUSE_S))
        else:
            self._disconnect(one)
            if one.status:
                self._let_end()  # the launcher ends the others now

    def _record_failure(self, one: Rank, ended: wire.Ended, now: float) -> None:
        text = choose_error(ended.output.split("\n"))[:_MOST_TEXT]
        waited = any(plain.waited is not None for plain in one.plain.values())
        if waited and events.is_timeout(text):  # of a collective: it had waited for others
            self._add_late(find_late(self.ranks.values(), now), now)
        if ended.unheard_s:
            self._add_event(one, events.UNHEARD, now, str(ended.unheard_s))
        else:
            self._add_event(one, events.KILLED if os.WIFSIGNALED(one.status or 0) else events.ERROR, now, text)

    # ---- ranks that have ended by a signal, which the launcher does not see while others save

    @property
    def _deferred(self) -> list[Rank]:
        return [one for one in self.ranks.values() if one.state == DEFERRED]

    @property
    def _launcher_ends(self) -> bool:
        """Whether the launcher may have seen a rank that did not end well: it sends signals to the others then."""
        deferred = {one.rank for one in self._deferred}
        return self._is_ending or any(event.rank not in deferred for event in self.events)

    def _find_saving_s(self, now: float) -> float:
        """How long ranks may still save after a signal by which a rank has ended; 0: none does."""
        deferred = self._deferred
        left = [one for one in self.ranks.values() if one.status is None and not one.has_event]
        # what came to one rank came to all a moment later, if it was sent to the job
        may_save = any(one.signals for one in left) or any(now - one.heard <= _BACK_S for one in deferred)
        if not left or not may_save:
            return 0.0
        last = max(at for one in (*left, *deferred) for at in one.signals.values())
        return max(last + SAVES_S - now, 0.0)

    def _let_end(self) -> None:
        for one in self._connected:
            if one.status is not None:
                self._disconnect(one)
