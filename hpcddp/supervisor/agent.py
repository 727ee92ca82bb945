"""The agent, a process beside a rank: it reports the rank to the job's supervisor (`wire.py`), passes on the signals
that come for the rank, and ends it when the supervisor orders that; and the rank's program as its child."""

from __future__ import annotations

import _socket  # socket would take a tenth of exec's time
import _thread
import fcntl
import functools
import os
import select
import sys
import time
from contextlib import suppress

from hpcddp.guard.hpcddp_stand import ASK_FOR_STACKS, NO_WAIT
from hpcddp.processes import read_stat
from hpcddp.runs.hang import Stand
from hpcddp.runs.heartbeat import Beat, PageEntry, make_page
from hpcddp.signals import ENDING
from hpcddp.supervisor import wire
from hpcddp.supervisor.leftover import end_left, find_left, find_marked, kill_command

TYPE_CHECKING = False

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from hpcddp.runs.folder import AttemptFolder
else:
    import _signal as signal  # the same without enumerations, which cost exec a tenth of its time

_CONNECT_S = 3.0
_LAST_WORD_S = 2.0
_EXIT_S = 0.5  # for what ends by itself with its rank, such as workers of a loader
_MOST_TEXT = 10_000  # characters
_ORPHAN_S = 15.0  # without the supervisor and without the launcher that has started it
_ITSELF = 1.1  # of the lease, after which the rank ends itself if this process has not ended it
_ANSWER_S, _LOOK_S = 2.0, 0.05  # in which a rank writes its stacks
_NO_ANSWER = {
    "": "its process has ended",
    "Z": "its process has ended",
    "T": "it was stopped by a signal (SIGSTOP)",
    "D": "it waits for a disk or a file system (state D), and hears no signal",
}
#: A terminal sends these. Neither Python nor hpcddp's runtime saves at them: a program that catches SIGTERM gets that.
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_DRAIN_S = 2.0
_LAST_BYTES = 16384  # of the output, for the error
#: How a signal comes: to every process of the job; to this process alone; by the supervisor's order.
TO_ALL, TO_THIS, BY_SUPERVISOR = "to all", "to this", "by supervisor"
#: The same signal that comes in several of these ways within so many seconds was sent once.
_SAME_S = 15.0
_LATER_S = 0.5  # by which the scheduler's own comes behind what it, or a launcher in its step, has sent to others


class Agent:
    """The agent of one rank. It reports nothing as long as this host cannot reach the supervisor."""

    def __init__(
        self,
        attempt: AttemptFolder,
        address: wire.SupervisorAddress,
        rank: int,
        world_size: int,
        host: str,
        env: Mapping[str, str],
    ) -> None:
        self._attempt, self._address, self._env, self._host = attempt, address, env, host
        self._rank, self._hello = rank, wire.Hello(address.key, attempt.name, rank, world_size, host)
        self._launcher = os.getppid()
        self._page = make_page()
        self.path = self._page.path
        self._program = 0
        self._give: Callable[[int], None] = lambda _: None
        self._socket: _socket.socket | None = None
        self._lock = _thread.allocate_lock()
        self._heard: float | None = None  # when the supervisor last said something
        self._place = Stand()  # the last that was sent
        self._looks: dict[int, int] = {}  # of plain scripts' pulses by rank, at what was sent last
        self._over: dict[int, float] = {}  # the time at which such a rank's process was first found to have ended
        self._is_over = False
        self._given = 0  # signals that the supervisor has sent
        self._signals: list[int] = []  # that came from elsewhere, and that were not reported yet
        self._wait_s = 0.0  # at most, before this process ends
        self._unheard_s = 0  # for how long the supervisor was not heard before the rank was ended for that
        self._alive: int | None = None  # open as long as this process is there
        self.was_ended = False  # by the supervisor's order, or since that was not heard any more
        # in the environment of all that the rank has started; the page is this process's alone
        self._marks = {"HPCDDP_ATTEMPT": attempt.name, "HPCDDP_HEARTBEAT": self.path}

    def start(self, program: int, give: Callable[[int], None] = lambda _: None) -> None:
        """Begin to report, in a thread. `program`: its process. `give`: hands it a signal."""
        self._program, self._give = program, give
        _thread.start_new_thread(self._report, ())

    def measure(self) -> None:
        """Write what the job uses of this node. For the agent of its first rank."""
        from hpcddp.supervisor.usage import UsageSampler

        UsageSampler(self._attempt, self._host, self._env, self._read_phases).start()

    def _read_phases(self) -> list[float]:
        return next((list(one.phases) for one in self._page.read_entries() if one.phases), [])

    def send_signal(self, number: int) -> None:
        """Report a signal that came to the rank, or to its agent."""
        with self._lock:
            self._signals.append(number)
            with suppress(OSError):
                self._send_signals()

    def refuse(self, status: int, why: str) -> bool:
        """Report that the rank was not started; `status`: the exit status of this process. Whether it was heard."""
        self.start(0)
        return self.end(wire.Ended(status << 8, why))

    def end(self, ended: wire.Ended) -> bool:
        """Report that the rank has ended. Whether the supervisor has heard that."""
        until = time.monotonic() + _LAST_WORD_S
        while self._socket is None and time.monotonic() < until:
            time.sleep(0.01)  # it ended before the supervisor was reached
        with self._lock:
            self._is_over = True
            if self._socket is None:
                return False
            is_heard = False
            with suppress(OSError):
                self._socket.settimeout(_LAST_WORD_S)
                self._send_signals()
                self._send(self._read_beat())  # the last step that it made
                self._send(ended._replace(output=ended.output[:_MOST_TEXT], unheard_s=self._unheard_s))
                answers = wire.Incoming()
                while data := self._socket.recv(4096):  # it closes the connection once it has read that
                    waits = [one.seconds for one in answers.add(data) if isinstance(one, wire.Wait)]
                    if waits:
                        self._wait_s = waits[0]
                        return True
                is_heard = True
            self._socket.close()
            return is_heard

    def wait_for_others(self) -> None:
        """Stay, once the rank has ended, as long as the supervisor says: its launcher would end the others."""
        if self._wait_s and self._socket is not None:
            with suppress(OSError):
                self._socket.settimeout(self._wait_s)
                while self._socket.recv(4096):
                    pass
            self._socket.close()

    def end_left(self, emit: Callable[[str], None]) -> None:
        end_left(self._marks, self._env, emit, f"rank {self._rank}", _EXIT_S)
        if self._alive is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
            with suppress(OSError):  # it was killed
                os.write(self._alive, b"done\n")

    def outlive(self) -> None:
        """Start a process that ends what the rank has started if this one is killed, as launchers do once a rank has
        failed. It waits for the end of a pipe, in a session of its own, holds nothing open that a launcher waits for,
        and blocks the signals that a scheduler sends to all processes of a job."""
        ends, self._alive = os.pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        moves: list[tuple[int, ...]] = [
            (os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate((ends, nothing, nothing))
        ]
        for number in (int(name) for name in os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the list itself
                if number > 2 and os.get_inheritable(number):
                    moves.append((os.POSIX_SPAWN_CLOSE, number))
        shell, option, code, *words = kill_command(self._marks, self._env)
        line = (shell, option, f"read -r done && exit\n{code}", *words)
        env = {"PATH": self._env.get("PATH", os.defpath)}  # without what marks a rank's processes
        with suppress(OSError):  # without a shell, or another process
            os.posix_spawnp(shell, line, env, file_actions=moves, setsigmask=ENDING, setsid=True)
        os.close(ends)
        os.close(nothing)

    def _report(self) -> None:
        while not self._is_over and not self.was_ended:
            connection = self._connect()
            if connection is not None:
                with self._lock:
                    if self._is_over:
                        connection.close()
                        return
                    self._socket = connection
                self._report_on(connection)
                with self._lock:
                    if not self._is_over:  # else `end` sends the last message on it
                        self._socket = None
                        connection.close()
            self._check_lease()
            time.sleep(self._address.every_s / 4)

    def _connect(self) -> _socket.socket | None:
        for host in self._address.hosts:
            with suppress(OSError):
                found = _socket.getaddrinfo(host, self._address.port, 0, _socket.SOCK_STREAM)
                for family, kind, number, _, where in found:
                    connection = _socket.socket(family, kind, number)
                    connection.settimeout(_CONNECT_S)
                    with suppress(OSError):
                        connection.connect(where)
                        connection.sendall(wire.write(self._hello))
                        return connection
                    connection.close()
        return None

    def _report_on(self, connection: _socket.socket) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        incoming, every_s = wire.Incoming(), self._address.every_s
        due = time.monotonic()
        while not self._is_over:
            ready = poll.poll(max(due - time.monotonic(), 0) * 1000)
            if time.monotonic() - due > 2 * every_s and self._heard is not None:
                self._renew_lease()  # this process was suspended, as a whole job may be
            with self._lock:
                if self._is_over:
                    return
                try:
                    if ready:
                        data = connection.recv(4096)
                        if not data:
                            return
                        self._renew_lease()
                        for message in incoming.add(data):
                            self._obey(message)
                    if time.monotonic() >= due:
                        due = time.monotonic() + every_s
                        self._send_signals()
                        self._send(self._read_beat())
                        self._send_place()
                        self._send_stands()
                except OSError:
                    return
            self._check_lease()

    def _read_beat(self) -> Beat:
        return self._page.read()._replace(is_stopped=_read_state(self._program) == "T")  # as by SIGSTOP

    def _send_place(self) -> None:
        place = self._page.read_place()
        if place != self._place:
            self._place = place
            self._send(place)

    def _send_stands(self) -> None:
        """Send where each rank of a plain script stands, if that is new. A rank that has ended stands at its end: its
        status is known to what has started it (torchrun)."""
        for one in self._page.read_entries():
            if one.looks != self._looks.get(one.rank, 0):
                self._send(wire.PlainStand(one.rank, one.world_size, *one.stand))
            elif one.looks and _read_state(one.process) in {"", "Z"}:
                over_s = time.monotonic() - self._over.setdefault(one.rank, time.monotonic())
                stand = Stand("its end", "", over_s, NO_WAIT, one.stand.collectives)
                self._send(wire.PlainStand(one.rank, one.world_size, *stand))
            self._looks[one.rank] = one.looks

    def _send_stacks(self, request: str) -> None:
        found = [(one.rank, *read_stacks(one)) for one in self._page.read_entries()]
        if not found:
            found = [(self._rank, "", "no Python of it has begun yet, or what started it has changed its environment")]
        with self._lock, suppress(OSError):
            for nth, (rank, text, why) in enumerate(found, 1):
                if self._socket is not None and not self._is_over:
                    self._send(wire.Stacks(request, len(found) - nth, rank, text, why))

    def _send_signals(self) -> None:
        while self._socket is not None and self._signals:
            self._send(wire.Signalled(self._signals[0]))
            del self._signals[0]

    def _obey(self, message: wire.Message) -> None:
        if isinstance(message, wire.Kill):
            self._end_rank()
        elif isinstance(message, wire.Give) and message.nth > self._given:
            self._given = message.nth
            self._give(message.number)
        elif isinstance(message, wire.Ask):
            _thread.start_new_thread(self._send_stacks, (message.request,))
        elif isinstance(message, wire.Until):
            with suppress(OSError):
                self._page.write_end(message.at)

    def _renew_lease(self) -> None:
        """Begin the lease anew, also on the rank's page: the rank may run while this process is stopped."""
        self._heard = time.monotonic()
        if self._address.lease_s:
            with suppress(OSError):
                self._page.write_lease(self._heard + self._address.lease_s * _ITSELF)

    def _check_lease(self) -> None:
        if self._heard is None or self.was_ended:
            return
        unheard_s, lease_s = time.monotonic() - self._heard, self._address.lease_s
        is_orphan = unheard_s > _ORPHAN_S and os.getppid() != self._launcher  # both were killed: nobody ends this one
        if is_orphan or (lease_s and unheard_s > lease_s):
            self._unheard_s = round(unheard_s)
            self._end_rank()

    def _end_rank(self) -> None:
        """Kill the rank, and what it has started: `RankProgram.wait` returns then, and this process ends."""
        if self.was_ended or self._is_over:
            return
        self.was_ended = True
        if not self._program:
            return  # it was not started
        with suppress(OSError):
            os.kill(self._program, signal.SIGKILL)
        for process in find_left(self._marks, self._env):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _send(self, message: wire.Message) -> None:
        assert self._socket is not None
        self._socket.sendall(wire.write(message))


def _read_state(process: int) -> str:
    """R, S, D, T, Z, … as the kernel has it; "": there is no such process."""
    stat = read_stat(process)
    return stat.state if stat is not None else ""


def read_stacks(one: PageEntry) -> tuple[str, str]:
    """The stacks of this rank, or "" and why it writes none."""
    path = f"/proc/{one.process}/fd/{one.stacks}"
    try:
        before = size = os.stat(path).st_size
        os.kill(one.process, ASK_FOR_STACKS)
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and _read_state(one.process) not in {"", "Z", "T"}:
            time.sleep(_LOOK_S)
            last, size = size, os.stat(path).st_size
            if size == last > before:  # it has come to its end
                with open(path, "rb") as file:
                    file.seek(before)
                    return file.read().decode(errors="replace"), ""
    except OSError:
        pass  # it ends now
    return "", _NO_ANSWER.get(_read_state(one.process), "it does not answer")


# ---- the rank's program


class SignalCount:
    """Counts the signals that a program has had. `clock`: seconds, from anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came: dict[int, list[tuple[float, str]]] = {}

    def is_new(self, number: int, way: str) -> bool:
        """Count a signal. Whether it is news for the program, which may have had it already in another way: mpirun
        passes on what a scheduler sends to mpirun and to the ranks alike."""
        now = self._clock()
        came = [(at, one) for at, one in self._came.get(number, ()) if now - at < _SAME_S]
        had = max((sum(one == other for _, other in came) for one in (TO_ALL, TO_THIS, BY_SUPERVISOR)), default=0)
        came.append((now, way))
        self._came[number] = came
        return sum(one == way for _, one in came) > had


class RankProgram:
    """A rank's program, as a process beside this one, which it does not outlive. OSError if it cannot run.

    `stderr`: its own, if given. `apart`: it has a process group of its own, so that a launcher's signals to the group
    of this process come to this one alone. `in_step`: the scheduler signals every process of this step, and its
    launcher, which passes that on. `rank_marks`: of a program that starts the ranks of this node (torchrun), the
    variables that it sets for each.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        stderr: int | None = None,
        *,
        apart: bool = True,
        in_step: bool = False,
        rank_marks: tuple[str, ...] = (),
    ) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored there is no status to wait for
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
        alive, _open_until_the_end = os.pipe()
        os.set_inheritable(alive, True)
        moves = [] if stderr is None else [(os.POSIX_SPAWN_DUP2, stderr, 2)]
        # No fork: it would copy what Python has in memory.
        spawn = functools.partial(os.posix_spawnp, command[0], command, env, setsigmask=mask, file_actions=moves)
        self.process = spawn(setpgroup=0) if apart else spawn()
        # The kernel sends SIGKILL to the program when the pipe's other end is closed, at this process's end. The
        # program itself would have to ask for PR_SET_PDEATHSIG.
        fcntl.fcntl(alive, fcntl.F_SETOWN, self.process)
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
        self._apart, self._in_step, self._rank_marks = apart, in_step, rank_marks
        self._lock = _thread.allocate_lock()
        self._count = SignalCount()
        self._is_over = False

    def give(self, number: int, way: str) -> None:
        """Hand the program a signal that has come, unless it has had it. Of one that came to every process of the job
        that is only counted."""
        with self._lock:
            ranks: list[int] = []
            if (
                way == BY_SUPERVISOR
                and self._rank_marks
                and number not in _OF_TERMINAL
                and _ends_by(self.process, number)
            ):
                ranks = find_marked(self.process, self._rank_marks)  # torchrun passes on SIGTERM, and would end
            if way == BY_SUPERVISOR and not ranks:
                number = _choose_signal(self.process, number)
            if self._is_over or not self._count.is_new(number, way) or way == TO_ALL:
                return
            for process in ranks or [self.process]:
                with suppress(ProcessLookupError):
                    os.kill(process, _choose_signal(process, number) if ranks else number)

    def wait(self, record: Callable[[int], None] = lambda _: None) -> int:
        """The wait status of the program. Until it ends, signals that come to this process are given to it. `record`
        is called with each of them."""
        while True:
            came = signal.sigwaitinfo({*ENDING, signal.SIGCHLD})
            if came.si_signo == signal.SIGCHLD:
                with self._lock:  # nobody signals a process number that may be another's
                    ended, status = os.waitpid(self.process, os.WNOHANG)
                    self._is_over = ended != 0
                if ended:
                    self._wait_for_signal(status, record)
                    return status
            else:
                ways = [TO_ALL if self._is_to_all(came) else TO_THIS]
                again = signal.sigtimedwait({came.si_signo}, _LATER_S) if self._in_step and ways == [TO_THIS] else None
                ways += [] if again is None else [TO_ALL if self._is_to_all(again) else TO_THIS]
                for way in sorted(ways, key=lambda way: way != TO_ALL):
                    self.give(came.si_signo, way)
                record(came.si_signo)

    def _wait_for_signal(self, status: int, record: Callable[[int], None]) -> None:
        """Wait for the signal that may have ended the program, which may get it before this process."""
        may_end_so = ENDING & {os.WTERMSIG(status)} if os.WIFSIGNALED(status) else ENDING
        is_sent_to_all = self._in_step or not self._apart
        came = signal.sigtimedwait(may_end_so, _LATER_S) if status and is_sent_to_all and may_end_so else None
        if came is not None:
            self._count.is_new(came.si_signo, TO_ALL)
            record(came.si_signo)

    def _is_to_all(self, came: signal.struct_siginfo) -> bool:
        """Whether the program has had this signal, too: a terminal sends its own to the whole group; another user is a
        scheduler's daemon or the system. A sender outside of this container has the number 0."""
        if came.si_code > 0:
            return not self._apart
        if came.si_uid != os.getuid():
            return True
        with suppress(OSError), open(f"/proc/{came.si_pid}/comm", encoding="ascii", errors="replace") as file:
            from hpcddp.schedulers.registry import all_schedulers  # not before the program's start

            return file.read().strip() in {name for row in all_schedulers() for name in row.daemons}
        return came.si_pid == 0 and not self._apart


def _choose_signal(process: int, number: int) -> int:
    """The signal itself, or SIGTERM for a process that catches that and would end by this one."""
    would_end = number in _OF_TERMINAL or _ends_by(process, number)
    return signal.SIGTERM if would_end and _handles(process, signal.SIGTERM, b"SigCgt") else number


def _ends_by(process: int, number: int) -> bool:
    return not _handles(process, number, b"SigCgt", b"SigIgn", b"SigBlk")


def _handles(process: int, number: int, *ways: bytes) -> bool:
    """Whether the process catches the signal (SigCgt), ignores (SigIgn) or blocks it (SigBlk)."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/status", "rb") as file:
        text = file.read()
        return any(int(text.split(way + b":")[1].split()[0], 16) >> (number - 1) & 1 for way in ways)
    return False


def end_alike(status: int) -> NoReturn:
    """End this process at once with the exit status or the signal that ended the program."""
    with suppress(OSError):
        sys.stdout.flush()
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    import resource

    number = os.WTERMSIG(status)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # the program has left its core
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


class Stderr:
    """Passes rank 0's stderr on to the job's output, and keeps its end for the error."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._read, self._write = os.pipe()
        self._done = _thread.allocate_lock()
        self._end = b""

    @property
    def entry(self) -> int:
        return self._write

    def start(self) -> None:
        """Pass on what comes, in a thread. The program has started."""
        os.close(self._write)
        self._done.acquire()
        _thread.start_new_thread(self._pass_on, ())

    def finish(self) -> None:
        """Wait for the rest. The program has ended; what it left behind may write more."""
        self._done.acquire(timeout=_DRAIN_S)

    @property
    def end(self) -> str:
        return self._end.decode(errors="replace")

    def _pass_on(self) -> None:
        while text := os.read(self._read, 65536):
            self._end = (self._end + text)[-_LAST_BYTES:]
            write_all(self._output, text)
        self._done.release()


def write_all(output: int, data: bytes) -> None:
    """Write all of it. A full disk, or a terminal that is gone, does not end the job."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(output, data) :]
            except BlockingIOError:  # another program has set its end of this terminal or pipe so
                poll = select.poll()
                poll.register(output, select.POLLOUT)
                poll.poll()
