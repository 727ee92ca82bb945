"""The process that stays beside a rank's program, to say how it ended: it passes signals on, and ends as the program.

Only in a job whose ranks write to logs. Elsewhere `hpcddp exec` becomes the program, and what it prints is seen anyway.
"""

from __future__ import annotations

import _thread  # threading would cost exec a tenth of its time
import fcntl
import os
import sys
from contextlib import suppress

from hpcddp.ranks.lookup_warning import split_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from typing import NoReturn
else:
    import _signal as signal  # the same without enumerations, which cost exec a tenth of its time

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_REST_S = 2.0
_KEPT = 16384  # bytes


def start_program(command: list[str], env: Mapping[str, str], stderr: int | None = None) -> int:
    """Start the program, with `stderr` as its own if given; returns its process number. OSError if it cannot run.

    The program does not outlive this process, whatever ends it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored there is no status to wait for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    alive, _kept_open = os.pipe()
    os.set_inheritable(alive, True)
    moves = [] if stderr is None else [(os.POSIX_SPAWN_DUP2, stderr, 2)]
    # No fork: it would copy what Python has in memory.
    program = os.posix_spawnp(command[0], command, env, setsigmask=mask, file_actions=moves)
    # The kernel sends SIGKILL to the program when the pipe's other end is closed, at this process's end. The program
    # itself would have to ask for PR_SET_PDEATHSIG.
    fcntl.fcntl(alive, fcntl.F_SETOWN, program)
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    return program


def wait_for(program: int) -> int:
    """The wait status of the program. Until it ends, signals that come to this process go on to it.

    A launcher signals the whole process group, so that the program may see a signal twice. The terminal's are not
    passed on: the terminal sends them to the whole group itself.
    """
    while True:
        came = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if came.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(program, os.WNOHANG)
            if ended:
                return status
        elif came.si_code <= 0:  # a process sent it, not the kernel
            with suppress(ProcessLookupError):
                os.kill(program, came.si_signo)


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
