"""The process beside a rank tells the job's supervisor how the rank is, and ends it when the supervisor says so.

One line per message. To the supervisor: `hello KEY ATTEMPT RANK RANKS HOST`, `beat STEP MOVES LOOKS TOUCHED STOPPED
USES`, `ended STATUS ERROR`, `at PLACE`, `unheard SECONDS`, `came SIGNAL`, where the error is the last line of a rank's
output and the place is where it stands, both in hexadecimal digits. `unheard` comes before `ended`: the rank was ended
since nothing was heard for so long. `came`: a signal that is not by the supervisor's word. From it: `ok` to each of
them, or `end`, `until TIME`, or `signal NTH SIGNAL`: the rank gets this one, the NTH of its attempt. To `ended` it
closes the connection, or answers `wait SECONDS` and closes it later: other ranks still save, and the launcher would
kill them at the end of this process.
"""

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

from hpcddp.ranks.lookup_warning import split_output
from hpcddp.runs.heartbeat import make_page, read_supervised
from hpcddp.signals import ENDING
from hpcddp.supervisor.leftover import end_left, find_left, kill_left

TYPE_CHECKING = False

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.runs.heartbeat import Supervised
else:
    import _signal as signal  # the same without enumerations, which cost exec a tenth of its time

_CONNECT_S = 3.0
_LAST_WORD_S = 2.0
_REST_S = 0.5  # for what ends by itself with its rank, such as workers of a loader
_GRACE_S = 2.0  # from SIGTERM to SIGKILL
_MOST_TEXT = 400  # characters
_ORPHAN_S = 15.0  # without the supervisor and without the launcher that has started it
_ITSELF = 1.1  # of the lease, after which the rank ends itself if this process has not ended it


class Heartbeat:
    """Of one rank. Nothing is told where no supervisor listens, or where this host cannot reach it."""

    def __init__(self, attempt: AttemptFolder, rank: int, world_size: int, host: str, env: Mapping[str, str]) -> None:
        """`env`: of this process."""
        self._attempt, self._rank, self._world_size, self._host = attempt, rank, world_size, host
        self._env = env
        self._supervised = read_supervised(attempt)
        self._launcher = os.getppid()
        self._page = make_page() if self._supervised else None
        self._program = 0
        self._socket: _socket.socket | None = None
        self._lock = _thread.allocate_lock()
        self._heard: float | None = None  # when the supervisor last said something
        self._place = ""  # the last that was told
        self._is_over = False
        self._give: Callable[[int], None] = lambda _: None
        self._given = 0  # signals, by the supervisor's word
        self._came: list[int] = []  # signals that it has not been told of
        self._wait_s = 0.0  # at most, before this process ends
        self._unheard_s = 0.0  # for how long the supervisor was not heard before the rank was ended for that
        self._alive: int | None = None  # open as long as this process is there
        self.was_ended = False  # by the supervisor's word, or since it was not heard any more

    @property
    def is_needed(self) -> bool:
        """Whether another attempt may follow in the same job, so that the end of this one has to be seen."""
        return self._supervised is not None and self._supervised.lease_s > 0

    @property
    def path(self) -> str:
        """The page, for the rank; empty: there is none."""
        return self._page.path if self._page is not None else ""

    def start(self, program: int, give: Callable[[int], None] = lambda _: None) -> None:
        """The rank has started, as this process. What follows is done in a thread. `give`: hands it a signal."""
        self._program, self._give = program, give
        if self._supervised is not None:
            _thread.start_new_thread(self._beat, (self._supervised,))

    def note_signal(self, number: int) -> None:
        """A signal came to the rank, or to the process beside it."""
        with self._lock:
            self._came.append(number)
            with suppress(OSError):
                self._say_signals()

    def refuse(self, status: int, why: str) -> None:
        """The rank was not started; `status`: the exit status instead of its."""
        self.start(0)
        self.end(status << 8, why)

    def end(self, status: int, error: str) -> None:
        """The rank has ended with this wait status; `error`: the last line of its output, of one that failed."""
        until = time.monotonic() + _LAST_WORD_S
        while self._supervised is not None and self._socket is None and time.monotonic() < until:
            time.sleep(0.01)  # it ended before the supervisor was reached
        with self._lock:
            self._is_over = True
            if self._socket is None:
                return
            with suppress(OSError):
                self._socket.settimeout(_LAST_WORD_S)
                self._say_signals()
                self._say(self._describe())  # the last step that it made
                if self._unheard_s:
                    self._say(f"unheard {self._unheard_s:.0f}")
                self._say(f"ended {status} {error[:_MOST_TEXT].encode(errors='replace').hex() or '-'}")
                answer = b""
                while came := self._socket.recv(4096):  # it closes the connection once it has read that
                    *lines, answer = (answer + came).split(b"\n")
                    waits = [line for line in lines if line.startswith(b"wait ")]
                    if waits:
                        self._wait_s = float(waits[0].split()[1])
                        return
            self._socket.close()

    def wait_for_savers(self) -> None:
        """The rank has ended by a signal: this process does not yet, where other ranks still save at it."""
        if self._wait_s and self._socket is not None:
            with suppress(OSError):
                self._socket.settimeout(self._wait_s)
                while self._socket.recv(4096):
                    pass

    def end_left(self, tell: Callable[[str], None]) -> None:
        """The rank has ended, and that was told: what it has started ends, too. On the other hosts nobody else does
        it. A launcher that ends this process, since a rank has failed, gives it no long time."""
        if self.path:
            end_left(self._marks, self._env, tell, f"rank {self._rank}", _REST_S, _GRACE_S)
            if self._alive is not None:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
                with suppress(OSError):  # it was killed
                    os.write(self._alive, b"done\n")

    def outlive(self) -> None:
        """A process ends what the rank has started where this one is killed, as launchers do with all ranks once one
        has failed: nobody else on this host does it. It waits for the end of a pipe, in a session of its own, holds
        nothing open that a launcher waits for, and does not hear the signals that a scheduler sends to all processes of
        a job."""
        if not self.path:
            return
        ends, self._alive = os.pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        moves: list[tuple[int, ...]] = [
            (os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate((ends, nothing, nothing))
        ]
        for number in (int(name) for name in os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the list itself
                if number > 2 and os.get_inheritable(number):
                    moves.append((os.POSIX_SPAWN_CLOSE, number))
        name = self._attempt.name
        shell, option, code, *words = kill_left({"HPCDDP_ATTEMPT": name, "HPCDDP_HEARTBEAT": self.path}, self._env)
        line = (shell, option, f"read -r done && exit\n{code}", *words)
        env = {"PATH": self._env.get("PATH", os.defpath)}  # without what marks a rank's processes
        with suppress(OSError):  # without a shell, or another process
            os.posix_spawnp(shell, line, env, file_actions=moves, setsigmask=ENDING, setsid=True)
        os.close(ends)
        os.close(nothing)

    @property
    def _marks(self) -> dict[str, str]:
        """What the environment of all that the rank has started has."""
        # an agent's ranks have other numbers than it has; the page is this process's alone
        own = {"HPCDDP_HEARTBEAT": self.path} if self.path else {"RANK": str(self._rank)}
        return {"HPCDDP_RUN_DIR": self._attempt.run.path, "HPCDDP_ATTEMPT": self._attempt.name, **own}

    def _beat(self, told: Supervised) -> None:
        while not self._is_over and not self.was_ended:
            connection = self._connect(told)
            if connection is not None:
                with self._lock:
                    if self._is_over:
                        connection.close()
                        return
                    self._socket = connection
                self._converse(connection, told)
                with self._lock:
                    if not self._is_over:  # else the last word is said on it
                        self._socket = None
                        connection.close()
            self._check_lease(told)
            time.sleep(told.every_s / 4)

    def _connect(self, told: Supervised) -> _socket.socket | None:
        for host in told.hosts:
            with suppress(OSError):
                for family, kind, number, _, where in _socket.getaddrinfo(host, told.port, 0, _socket.SOCK_STREAM):
                    connection = _socket.socket(family, kind, number)
                    connection.settimeout(_CONNECT_S)
                    with suppress(OSError):
                        connection.connect(where)
                        hello = f"hello {told.key} {self._attempt.name} {self._rank} {self._world_size} {self._host}\n"
                        connection.sendall(hello.encode(errors="replace"))
                        return connection
                    connection.close()
        return None

    def _converse(self, connection: _socket.socket, told: Supervised) -> None:
        """Until the connection breaks, or the rank is to end."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        begun = b""
        due = time.monotonic()
        while not self._is_over:
            ready = poll.poll(max(due - time.monotonic(), 0) * 1000)
            if time.monotonic() - due > 2 * told.every_s and self._heard is not None:
                self._note_heard(told)  # this process was suspended, as a whole job may be
            with self._lock:
                if self._is_over:
                    return
                try:
                    if ready:
                        came = connection.recv(4096)
                        if not came:
                            return
                        self._note_heard(told)
                        *lines, begun = (begun + came).split(b"\n")
                        for line in lines:
                            self._obey(line.decode(errors="replace").split())
                    if time.monotonic() >= due:
                        due = time.monotonic() + told.every_s
                        self._say_signals()
                        self._say(self._describe())
                        self._say_place()
                except OSError:
                    return
            self._check_lease(told)

    def _describe(self) -> str:
        page = self._page
        if page is None:
            return f"beat 0 0 0 0 {int(self._is_stopped())} 0"
        beat = page.read()
        return f"beat {beat.step} {beat.moves} {beat.looks} {beat.touched} {int(self._is_stopped())} {beat.uses}"

    def _say_place(self) -> None:
        place = self._page.read_place() if self._page is not None else ""
        if place != self._place:
            self._place = place
            self._say(f"at {place.encode().hex() or '-'}")

    def _say_signals(self) -> None:
        while self._socket is not None and self._came:
            self._say(f"came {self._came[0]}")
            del self._came[0]

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped the rank, as SIGSTOP does."""
        with suppress(OSError), open(f"/proc/{self._program}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
        return False

    def _obey(self, words: list[str]) -> None:
        if words[:1] == ["end"]:
            self._end_rank()
        elif words[:1] == ["signal"]:
            nth, number = map(int, words[1:])
            if nth > self._given:  # they are said again where the connection was broken
                self._given = nth
                self._give(number)
        elif words[:1] == ["until"] and self._page is not None:
            with suppress(OSError, ValueError, IndexError):
                self._page.write_end(float(words[1]))

    def _note_heard(self, told: Supervised) -> None:
        """From now on the lease counts; the rank is told, too: this process may be stopped while the rank is not."""
        self._heard = time.monotonic()
        if told.lease_s and self._page is not None:
            with suppress(OSError):
                self._page.write_lease(self._heard + told.lease_s * _ITSELF)

    def _check_lease(self, told: Supervised) -> None:
        if self._heard is None or self.was_ended:
            return
        unheard_s = time.monotonic() - self._heard
        is_orphan = unheard_s > _ORPHAN_S and os.getppid() != self._launcher  # both were killed: nobody ends this one
        if is_orphan or (told.lease_s and unheard_s > told.lease_s):
            self._unheard_s = unheard_s
            self._end_rank()

    def _end_rank(self) -> None:
        """The rank, and what it has started. The process beside it sees that, and ends too."""
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

    def _say(self, line: str) -> None:
        assert self._socket is not None
        self._socket.sendall(f"{line}\n".encode())


# The process that stays beside a rank's program: it gives it each signal once, and says how it ended.


#: A terminal sends these. Neither Python nor hpcddp's runtime saves at them: a program that catches SIGTERM gets that.
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_OUTPUT_REST_S = 2.0
_KEPT = 16384  # bytes
#: How a signal comes: to every process of the job; to this process alone; by the supervisor's word.
TO_ALL, TO_THIS, BY_WORD = "to all", "to this", "by word"
#: The same signal that comes in several of these ways within so many seconds was sent once.
_SAME_S = 15.0
_LATER_S = 0.5  # by which the scheduler's own comes behind what it, or a launcher in its step, has sent to others


class SignalCount:
    """The signals that a program has had. `clock`: seconds, from anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came: dict[int, list[tuple[float, str]]] = {}

    def is_new(self, number: int, way: str) -> bool:
        """Count one that has come. Whether it is none that the program has had already, since it came in another way:
        mpirun passes on what a scheduler sends to mpirun and to the ranks alike."""
        now = self._clock()
        came = [(at, one) for at, one in self._came.get(number, ()) if now - at < _SAME_S]
        had = max((sum(one == other for _, other in came) for one in (TO_ALL, TO_THIS, BY_WORD)), default=0)
        came.append((now, way))
        self._came[number] = came
        return sum(one == way for _, one in came) > had

    def has_come(self, number: int) -> bool:
        """Whether this one has come at all."""
        return number in self._came


class Program:
    """A rank's program, as a process of its own beside this one. OSError if it cannot run.

    `stderr`: its own, if given. `apart`: whether it has a process group of its own, so that a launcher's signals to
    the group of this process come to this one alone. `in_step`: whether this is part of a step whose every process the
    scheduler signals, and its launcher, which passes that on. `rank_marks`: of a program that starts the ranks of this
    node (torchrun), the variables that it sets for each. It does not outlive this process, whatever ends that.
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
        alive, _kept_open = os.pipe()
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
            if way == BY_WORD and self._rank_marks and _choose_signal(self.process, number) != number:
                # torchrun passes on no signal but SIGTERM and those of a terminal
                ranks = find_marked(self.process, self._rank_marks) if number not in _OF_TERMINAL else []
            if way == BY_WORD and not ranks:
                number = _choose_signal(self.process, number)
            if self._is_over or not self._count.is_new(number, way) or way == TO_ALL:
                return
            for process in ranks or [self.process]:
                with suppress(ProcessLookupError):
                    os.kill(process, _choose_signal(process, number) if ranks else number)

    def wait(self, heard: Callable[[int], None] = lambda _: None) -> int:
        """The wait status of the program. Until it ends, signals that come to this process are given to it. `heard`:
        is called with each of them."""
        while True:
            came = signal.sigwaitinfo({*ENDING, signal.SIGCHLD})
            if came.si_signo == signal.SIGCHLD:
                with self._lock:  # nobody signals a process number that may be another's
                    ended, status = os.waitpid(self.process, os.WNOHANG)
                    self._is_over = ended != 0
                if ended:
                    self._hear_late(status, heard)
                    return status
            else:
                ways = [TO_ALL if self._is_to_all(came) else TO_THIS]
                again = signal.sigtimedwait({came.si_signo}, _LATER_S) if self._in_step and ways == [TO_THIS] else None
                ways += [] if again is None else [TO_ALL if self._is_to_all(again) else TO_THIS]
                for way in sorted(ways, key=lambda way: way != TO_ALL):
                    self.give(came.si_signo, way)
                heard(came.si_signo)

    def _hear_late(self, status: int, heard: Callable[[int], None]) -> None:
        """What a scheduler sends to every process of a step may have ended the program before it comes to this one."""
        may_end_so = ENDING & {os.WTERMSIG(status)} if os.WIFSIGNALED(status) else ENDING
        is_sent_to_all = self._in_step or not self._apart
        came = signal.sigtimedwait(may_end_so, _LATER_S) if status and is_sent_to_all and may_end_so else None
        if came is not None:
            self._count.is_new(came.si_signo, TO_ALL)
            heard(came.si_signo)

    def read_end(self, status: int) -> int:
        """The program's wait status, for people. Python ends by SIGINT where nobody catches a KeyboardInterrupt: one
        that the program has raised itself is its own error."""
        is_error = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT
        return 128 + signal.SIGINT << 8 if is_error and not self._count.has_come(signal.SIGINT) else status

    def _is_to_all(self, came: signal.struct_siginfo) -> bool:
        """Whether the program has had this signal, too. A terminal sends its own to the whole group; what another user
        sends is a scheduler's daemon's or the system's. A sender outside of this container has the number 0."""
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
    would_end = number in _OF_TERMINAL or not _handles(process, number, b"SigCgt", b"SigIgn", b"SigBlk")
    return signal.SIGTERM if would_end and _handles(process, signal.SIGTERM, b"SigCgt") else number


def find_marked(process: int, marks: tuple[str, ...]) -> list[int]:
    """The processes below this one that have one of these variables, without those that they have started."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    begins, found, below = tuple(f"{mark}=".encode() for mark in marks), list[int](), children.get(process, [])
    while below:
        one = below.pop()
        with suppress(OSError), open(f"/proc/{one}/environ", "rb") as file:
            if any(line.startswith(begins) for line in file.read().split(b"\0")):
                found.append(one)
                continue
        below += children.get(one, ())
    return found


def _handles(process: int, number: int, *ways: bytes) -> bool:
    """Whether the process catches the signal (SigCgt), ignores it (SigIgn) or holds it back (SigBlk)."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/status", "rb") as file:
        text = file.read()
        return any(int(text.split(way + b":")[1].split()[0], 16) >> (number - 1) & 1 for way in ways)
    return False


def end_alike(status: int) -> NoReturn:
    """End this process with the exit status or the signal that ended the program."""
    if not os.WIFSIGNALED(status):
        _leave(os.WEXITSTATUS(status))
    import resource

    number = os.WTERMSIG(status)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # the program has left its core
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    _leave(128 + number)


def _leave(status: int) -> NoReturn:
    """Without taking the interpreter apart, which nobody waits for in exec's other form either."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


class Stderr:
    """Rank 0's stderr on its way to the job's output, without torch's warning about an address without a name."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._read, self._write = os.pipe()
        self._done = _thread.allocate_lock()
        self._end = b""

    @property
    def entry(self) -> int:
        """What the program has as its stderr."""
        return self._write

    def start(self) -> None:
        """The program has started: pass on what comes, in a thread."""
        os.close(self._write)
        self._done.acquire()
        _thread.start_new_thread(self._pass_on, ())

    def finish(self) -> None:
        """The program has ended: wait for the rest; not for what a process that it left behind may write."""
        self._done.acquire(timeout=_OUTPUT_REST_S)

    @property
    def end(self) -> str:
        """The last that the program wrote."""
        return self._end.decode(errors="replace")

    def _pass_on(self) -> None:
        begun = b""
        while text := os.read(self._read, 65536):
            ready, begun = split_output(begun + text)
            self._end = (self._end + ready)[-_KEPT:]
            _write_all(self._output, ready)
        self._end += begun
        _write_all(self._output, begun)
        self._done.release()


def _write_all(output: int, data: bytes) -> None:
    """A job that nobody reads any more has no use for it."""
    with suppress(OSError):
        while data:
            data = data[os.write(output, data) :]


def report(text: str, output: int) -> None:
    """Write to the job's output."""
    _write_all(output, text.encode(errors="replace"))
