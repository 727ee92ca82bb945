"""The launcher as a process beside this one: its output goes to the job's and into the log, signals go on to it."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.supervisor.sockets import allow_files

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from hpcddp.supervisor.events import Event
    from hpcddp.supervisor.order import Order
    from hpcddp.supervisor.output import Output
    from hpcddp.supervisor.teardown import Teardown
else:
    import _signal as signal  # the same without enumerations, which cost a quarter of the time of the start

_NAMES: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT",
    signal.SIGHUP: "SIGHUP",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGUSR2: "SIGUSR2",
}
#: What the launcher ignores: a terminal sends these to every process, and this one passes them on.
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
#: A wish to end the job, however long ago it came. The others mean what a program makes of them.
_ENDS = ("SIGTERM", "SIGINT")
_ACTS_S = 300.0  # that ranks may take to save and end after one of the others
_IDLE_S = 5.0
_REST_S = 5.0  # for what is left in the pipe once nobody should write any more
_FULL_S = 0.1  # until the next look whether what was read has been written
_READABLE = select.POLLIN | select.POLLHUP
_HINT = "put its folder on PATH, or name the module that brings it (modules in the job file)"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Ended(Record):
    """`status`: as a shell says it, 128 + the signal of a process that was killed. `signal`: the last one that came.
    `cause`: the first event of the ranks that did not end well."""

    status: int
    signal: str = ""
    cause: Event | None = None


class Signals:
    """The signals that come to this process, from when it is made: kept until they are read, and none ends it."""

    def __init__(self) -> None:
        self.entry, self._wake = os.pipe()
        os.set_blocking(self.entry, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (*_NAMES, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: what was started goes on when its terminal is closed
            signal.signal(number, _wake_up)

    def read(self) -> list[int]:
        """What came since it was last read, without the ends of processes."""
        with suppress(BlockingIOError):
            return [number for number in os.read(self.entry, 4096) if number in _NAMES]
        return []


def name_of(number: int) -> str:
    """`SIGTERM`."""
    return _NAMES[number]


def ended_by(name: str, ago_s: float, grace_s: float) -> bool:
    """Whether ranks that were lost so long after this signal ("": none came) may have ended by it, or by who sent it.
    `grace_s`: that the launcher leaves them then."""
    return name in _ENDS or (name != "" and ago_s <= max(_ACTS_S, grace_s))


def _wake_up(_number: int, _frame: object) -> None:
    """The pipe has the number."""


class Launcher:
    """A running launcher. Its words are found on the PATH of `env`. `log`: a file for its output, beside the job's.
    `files`: how many it may open, if not as many as this process."""

    def __init__(
        self, words: list[str], env: Mapping[str, str], log: str, output: Output, files: int | None = None
    ) -> None:
        self.entry, writes = os.pipe()
        self._output, self._log = output, _open_log(log)
        self._ended: int | None = None
        self._parent = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            self._become(words, env, writes, files)
        os.close(writes)

    def _become(self, words: list[str], env: Mapping[str, str], writes: int, files: int | None) -> NoReturn:
        """In the new process. Its signals are as a shell leaves them to a command in the background."""
        try:
            for number in (*_NAMES, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            for number in _OF_TERMINAL:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writes, 1)
            os.dup2(writes, 2)
            if files is not None:
                allow_files(files)
            _end_with_parent(self._parent)
            os.execvpe(words[0], words, dict(env))
        except OSError as error:
            told = f"hpcddp: {words[0]} cannot be run: {error.strerror}\nhint: {_HINT}\n"
            os.write(2, told.encode(errors="replace"))
        finally:
            os._exit(127)

    def send(self, number: int) -> None:
        """A signal, if the launcher is still there."""
        if self._ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

    @property
    def has_ended(self) -> bool:
        """Whether the launcher's process is gone."""
        if self._ended is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self._ended = os.waitstatus_to_exitcode(status) if ended else None
        return self._ended is not None

    @property
    def status(self) -> int:
        """Of a launcher that has ended."""
        assert self._ended is not None
        return self._ended if self._ended >= 0 else 128 - self._ended

    @property
    def is_ahead(self) -> bool:
        """Whether it says so much more than can be written that it has to wait."""
        return self._output.is_full

    def pass_output_on(self) -> bool:
        """What has come, to the job's output and the log; False at its end."""
        data = os.read(self.entry, 65536)
        self._output.pass_on(data, self._log)
        return data != b""

    def finish_output(self) -> None:
        """The rest of the output; what still writes was left behind somewhere, and is not waited for."""
        end = time.monotonic() + _REST_S
        poll = _poll(self.entry)
        while (left := end - time.monotonic()) > 0 and poll.poll(left * 1000):
            if not self.pass_output_on():
                return


def watch(
    launcher: Launcher,
    signals: Signals,
    passes_on: str,
    warn_at: Callable[[], float | None],
    order: Order,
    tell: Callable[[str], None],
    came: Callable[[int], None],
    teardown: Teardown | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Ended:
    """Wait for the launcher's end, or bring it about where ranks do not end well. `passes_on`: the signal that it gets
    for each one that comes here; "": none, since it would end before its ranks have saved.
    `warn_at`: when the ranks are warned by that signal, in seconds since 1970; it may move. `came`: is told of each
    that came.
    `idle` is called again and again.
    """
    number = int(getattr(signal, f"SIG{passes_on}")) if passes_on else 0
    becomes = f"was not passed on: {order.makes_ranks} would end before its ranks have saved"
    if number:
        within = f"; its ranks have {order.grace_s} seconds" if order.grace_s else ""
        becomes = f"was passed on as SIG{passes_on}{within}"
    poll = _poll(launcher.entry, signals.entry, *([teardown.entry] if teardown else []))
    last, came_at, is_read, is_closed, is_warned = "", 0.0, True, False, False
    while not launcher.has_ended:
        idle()
        warns = None if is_warned else warn_at()
        waits = [_IDLE_S] if warns is None else [_IDLE_S, max(warns - time.time(), 0)]
        waits += [teardown.look(launcher)] if teardown else []
        is_due = not (is_closed or launcher.is_ahead)
        if is_due and not is_read:
            poll.register(launcher.entry, _READABLE)
        elif is_read and not is_due:
            poll.unregister(launcher.entry)
        is_read = is_due
        waits += [_FULL_S] if launcher.is_ahead else []
        ready = [descriptor for descriptor, _ in poll.poll(min(waits) * 1000)]
        is_closed |= launcher.entry in ready and not launcher.pass_output_on()  # it may work on
        for one in signals.read() if signals.entry in ready else ():
            last, came_at = name_of(one), time.monotonic()
            if number:
                launcher.send(number)
            tell(f"{last} came and {becomes}")
            came(one)
            if teardown:
                teardown.is_wish = True
        if warns is not None and time.time() >= warns:
            is_warned = True
            launcher.send(number)
            tell(f"the ranks are warned: SIG{passes_on} was sent, as the job file's signal asks")
    cause = teardown.conclude(launcher.status) if teardown else None
    if cause is not None and not ended_by(last, time.monotonic() - came_at, order.grace_s):
        last = ""
    return Ended(launcher.status, last, cause)


def _poll(*entries: int) -> select.poll:
    poll = select.poll()
    for entry in entries:
        poll.register(entry, _READABLE)
    return poll


def _open_log(path: str) -> int | None:
    """None if it cannot be written: the job's output has it all."""
    with suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return None


def _end_with_parent(parent: int) -> None:
    """Whatever ends the supervisor, SIGKILL too, ends the launcher, which then ends its ranks."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
