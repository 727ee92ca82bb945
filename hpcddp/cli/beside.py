"""The process that stays beside a rank's program: it gives it each signal once, and says how it ended.

Only in a job whose ranks write to logs. Elsewhere `hpcddp exec` becomes the program, and what it prints is seen anyway.
"""

from __future__ import annotations

import _thread  # threading would cost exec a tenth of its time
import fcntl
import functools
import os
import sys
import time
from contextlib import suppress

from hpcddp.ranks.lookup_warning import split_output
from hpcddp.signals import ENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import NoReturn
else:
    import _signal as signal  # the same without enumerations, which cost exec a tenth of its time

#: A terminal sends these. Neither Python nor hpcddp's runtime saves at them: a program that catches SIGTERM gets that.
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_REST_S = 2.0
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
    scheduler signals, and its launcher, which passes that on. It does not outlive this process, whatever ends that.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        stderr: int | None = None,
        *,
        apart: bool = True,
        in_step: bool = False,
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
        self._apart, self._in_step = apart, in_step
        self._lock = _thread.allocate_lock()
        self._count = SignalCount()
        self._is_over = False

    def give(self, number: int, way: str) -> None:
        """Hand the program a signal that has come, unless it has had it. Of one that came to every process of the job
        that is only counted."""
        with self._lock:
            would_end = number in _OF_TERMINAL or not _handles(self.process, number, b"SigCgt", b"SigIgn", b"SigBlk")
            if way == BY_WORD and would_end and _handles(self.process, signal.SIGTERM, b"SigCgt"):
                number = signal.SIGTERM
            if self._is_over or not self._count.is_new(number, way) or way == TO_ALL:
                return
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

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
        self._done.acquire(timeout=_REST_S)

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
