"""The launcher as a child process, whose output is printed and logged; signals, which are passed on to the ranks; and
the end of an attempt that has lost ranks."""

from __future__ import annotations

import _thread
import os
import resource
import select
import subprocess
import time
from _queue import SimpleQueue  # queue would import threading, which costs a tenth of the start
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.signals import ENDING, name_signal
from hpcddp.supervisor.agent import write_all
from hpcddp.supervisor.events import LEFT, SILENT, STUCK, UNKNOWN, Event, find_first_cause
from hpcddp.supervisor.follow import ask_in_thread
from hpcddp.supervisor.rank import SAVES_S

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    from hpcddp.supervisor.reports import Reports
else:
    import _signal as signal  # the same without enumerations, which cost a quarter of the time of the start

#: A wish to end the job, however long ago it came. The others mean what a program makes of them.
WISHES = ("SIGTERM", "SIGINT")
_IDLE_S, _LOOK_S, _SOON_S = 5.0, 1.0, 0.1  # at most between two looks, by what is awaited
_HINT = "put its folder on PATH, or name the module that brings it (modules in the job file)"
_CANNOT_RUN = 127
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_FILE_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)  # the launcher's, too
#: Bytes that wait in memory for a slow reader. Above it nothing more is read of the launcher, whose ranks then wait.
MOST_BYTES = 64 * 1024 * 1024
_STEP_S = 0.02
_DRAIN_S = 5.0  # for what is left once nobody should write any more, or somebody wants the job to end
_ANSWER_S = 10.0  # for the scheduler's, and for the first call of ranks that were started
#: For what other ranks say: the first one to end need not be the cause.
_COLLECT_S = 5.0
_LAUNCHER_S = 30.0  # that it gets to end by itself, where nothing is started again
#: What the launcher gets, so many seconds from the end of the ranks: Open MPI 5 and Intel MPI ignore SIGTERM while a
#: host is silent.
_LAUNCHER_GETS = ((1.0, signal.SIGTERM), (6.0, signal.SIGKILL))
_LAST_WORDS_S = 1.0


def allow_more_files() -> None:
    """Let this process open as many files as its hard limit allows: it has a connection to each rank."""
    _, hard = _FILE_LIMITS
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class AttemptEnd(Record):
    """The end of an attempt. `status`: as a shell says it. `signal`: the last one that came and after which the ranks
    ended; `heard`: one that came to them alone. `cause`: the first event of ranks that did not end well."""

    status: int
    signal: str = ""
    cause: Event | None = None
    heard: str = ""


class Signals:
    """The signals that come to this process, from when it is made: kept until they are read, and none ends it."""

    def __init__(self) -> None:
        self.entry, self._wake = os.pipe()
        os.set_blocking(self.entry, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: what was started goes on when its terminal is closed
            signal.signal(number, lambda *_: None)  # the pipe has the number

    def read(self) -> list[int]:
        with suppress(BlockingIOError):
            return [number for number in os.read(self.entry, 4096) if number in ENDING]
        return []


def ended_by(name: str, ago_s: float) -> bool:
    """Whether ranks may have ended because this signal came so long ago ("": none came): a wish to end the job always
    counts, another signal as long as a rank may save."""
    return name in WISHES or (name != "" and ago_s <= SAVES_S)


class LauncherProcess:
    """A running launcher. Its words are found on the PATH of `env`. `log`: a file for its output, beside the job's.
    `apart`: whether it has a process group of its own, so that a terminal's signals come to this process alone."""

    def __init__(self, words: list[str], env: Mapping[str, str], log: str, output: Output, *, apart: bool) -> None:
        parent, (reads, writes) = os.getpid(), os.pipe()

        def prepare() -> None:
            if apart:
                os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_NOFILE, _FILE_LIMITS)
            _end_with_parent(parent)

        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                words, env=dict(env), stdin=subprocess.DEVNULL, stdout=writes, stderr=writes, preexec_fn=prepare
            )
        except OSError as error:
            text = f"hpcddp: {words[0]} cannot be run: {error.strerror}\nhint: {_HINT}\n"
            os.write(writes, text.encode(errors="replace"))
        os.close(writes)
        self._copied = output.copy(reads, log)

    def send(self, number: int) -> None:
        """Send a signal, if the launcher is still there."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def status(self) -> int:
        """The exit status of a launcher that has ended, as a shell says it."""
        status = _CANNOT_RUN if self._process is None else self._process.wait()
        return status if status >= 0 else 128 - status

    def finish_output(self) -> None:
        self._copied.acquire(timeout=_DRAIN_S)


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process, and so its ranks, once its parent has ended, by SIGKILL too."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


# ---- what the job prints and logs


class Writer:
    """Writes to descriptors in a thread, in order: a reader that pauses, or a file system that hangs, does not keep the
    job from hearing the ranks, which would end themselves. `left`: bytes that are still to be written."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
        self._lock = _thread.allocate_lock()
        self.left = 0
        _thread.start_new_thread(self._write_on, ())

    def write(self, descriptor: int, data: bytes) -> None:
        with self._lock:
            self.left += len(data)
        self._queue.put((descriptor, data))

    def close(self, descriptor: int) -> None:
        """Close it, once all that came before is written."""
        self._queue.put((descriptor, None))

    def _write_on(self) -> None:
        while True:
            descriptor, data = self._queue.get()
            if data is None:
                with suppress(OSError):  # a full disk may show only now
                    os.close(descriptor)
                continue
            write_all(descriptor, data)
            with self._lock:
                self.left -= len(data)


class Output:
    """The output of one job: what it prints, and the launcher's log, which does not wait for who reads the other."""

    def __init__(self) -> None:
        self._printed, self._logged = Writer(), Writer()

    def print(self, data: bytes) -> None:
        """Print a message of the supervisor on stderr."""
        self._printed.write(2, data)

    def copy(self, entry: int, log: str) -> _thread.LockType:
        """Print and log what comes there, in a thread; a lock that is free at its end."""
        done, file = _thread.allocate_lock(), None
        with suppress(OSError):
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

        def pass_on() -> None:
            while data := os.read(entry, 65536):
                self._printed.write(1, data)
                if file is not None:
                    self._logged.write(file, data)
                while max(self._printed.left, self._logged.left) > MOST_BYTES:
                    time.sleep(_STEP_S)
            os.close(entry)
            if file is not None:
                self._logged.close(file)
            done.release()

        done.acquire()
        _thread.start_new_thread(pass_on, ())
        return done

    def finish(self, signals: Signals) -> None:
        until = None
        while (self._printed.left or self._logged.left) and (until is None or time.monotonic() < until):
            time.sleep(_STEP_S)
            if signals.read() and until is None:
                until = time.monotonic() + _DRAIN_S


# ---- signals to the ranks


class _PendingSignal(Record):
    """A signal on its way. `due`: on the monotonic clock. `answer`: the scheduler's. `is_printed`: already."""

    number: int
    due: float
    answer: SimpleQueue[bool | None] | None = None
    is_printed: bool = False


class SignalRelay:
    """Passes signals on to the ranks of one attempt, by their agents and not by the launcher.

    A scheduler may signal every process of a job. So a signal waits for `settle_s`: a rank that has had it by then gets
    no other. `is_ending`: asks the scheduler whether it ends the job, and sends the ranks SIGTERM itself; None: it does
    not. `by_hand`: a person may sit at the terminal. `warn_at`: when the ranks are warned, in seconds since 1970.
    """

    def __init__(
        self,
        reports: Reports,
        emit: Callable[[str], None],
        settle_s: float,
        is_ending: Callable[[], bool] | None,
        warn_at: Callable[[], float | None],
        *,
        by_hand: bool,
    ) -> None:
        self._reports, self._emit, self._settle_s, self._is_ending = reports, emit, settle_s, is_ending
        self._warn_at, self._is_warned, self.by_hand = warn_at, False, by_hand
        self._waiting: list[_PendingSignal] = []

    def receive(self, number: int) -> None:
        answer = ask_in_thread(self._is_ending) if self._is_ending is not None and number == signal.SIGTERM else None
        is_printed = self.by_hand and number == signal.SIGINT
        self._waiting.append(_PendingSignal(number, time.monotonic() + self._settle_s, answer, is_printed))
        if is_printed:
            self._emit("Ctrl-C: the ranks save and stop; once more kills them")

    def poll(self, launcher: LauncherProcess) -> float:
        """Do what is due; how long to wait at most until the next call, in seconds."""
        warns = None if self._is_warned else self._warn_at()
        warns_in_s = _IDLE_S if warns is None else max(warns - time.time(), 0.0)
        if warns is not None and not warns_in_s:
            self._is_warned = True
            self._waiting.insert(0, _PendingSignal(signal.SIGUSR1, time.monotonic(), is_printed=True))
            self._emit("the ranks are warned: SIGUSR1 is sent, as the job file's signal asks")
        while self._waiting and self._waiting[0].due <= time.monotonic():
            if not self._pass_on(self._waiting[0], launcher):
                break
            del self._waiting[0]
        return _SOON_S if self._waiting else min(_IDLE_S, warns_in_s)

    def _pass_on(self, one: _PendingSignal, launcher: LauncherProcess) -> bool:
        """Whether that was possible: not while an answer may come, of the scheduler or of ranks that start."""
        reports = self._reports
        is_unanswered = one.answer is not None and one.answer.empty()
        is_late = time.monotonic() - one.due >= _ANSWER_S
        if not is_late and (is_unanswered or (reports.are_started and not reports.ranks)):
            return False
        if one.answer is not None and not is_unanswered and one.answer.get():
            self._print(one, "the scheduler ends the job, and gives it to the ranks itself")
            return True
        reports.give(one.number)  # also to ranks that call later
        if reports.ranks:
            self._print(one, "each rank gets it")
        else:
            what = "can call this host" if reports.are_started else "has started"
            self._print(one, f"no rank {what}, so the launcher gets it")
            launcher.send(one.number)
        return True

    def finish(self) -> None:
        """Print what is left: the launcher has ended."""
        for one in self._waiting:
            self._print(one, "the ranks ended")

    def _print(self, one: _PendingSignal, what: str) -> None:
        if not one.is_printed:
            self._emit(f"{name_signal(one.number)} came: {what}")


# ---- the end of an attempt


class Teardown:
    """Ends one attempt of which ranks are lost or have failed: no launcher can be trusted to see it, or to end then.
    Intel MPI and MPICH wait for ever for the others of a rank that ended with status 1, every launcher does where a
    host falls silent, and Open MPI leaves ranks behind. `acts`: whether the ranks may be started again. `judges`:
    whether the end of one rank is that of all; False where they are independent."""

    def __init__(self, reports: Reports, emit: Callable[[str], None], *, acts: bool, judges: bool = True) -> None:
        self._reports, self._emit, self._acts, self._judges = reports, emit, acts, judges
        self._began: float | None = None  # when the first event was seen
        self._ended_at: float | None = None  # when the ranks were ordered to end
        self._launcher_gets = [*_LAUNCHER_GETS]
        self.is_wish = False  # a signal came: the ranks may end as they like

    @property
    def entry(self) -> int:
        return self._reports.entry

    def poll(self, launcher: LauncherProcess) -> float:
        """Read from the ranks, and do what is due; how long to wait at most until the next call, in seconds."""
        reports, now = self._reports, time.monotonic()
        reports.read()
        reports.check()
        self._print_remarks()
        if self._ended_at is not None:
            if self._launcher_gets and now - self._ended_at > self._launcher_gets[0][0]:
                launcher.send(self._launcher_gets.pop(0)[1])
        elif reports.events and self._judges and not reports.is_deferring:  # some save
            self._began = self._began or now
            waits_s = _COLLECT_S if self._acts and not self.is_wish else _COLLECT_S + _LAUNCHER_S
            was_waited = any(event.kind in {SILENT, STUCK} for event in reports.events)  # long enough for everybody
            if was_waited or now - self._began > waits_s:
                reports.finish()
                if not reports.all_over:
                    self._emit(f"{find_first_cause(reports.events)}: the other ranks are ended")
                self.kill()
        else:
            return _LOOK_S
        return _LOOK_S / 4

    def kill(self) -> None:
        self._ended_at = self._ended_at or time.monotonic()
        self._reports.end_all()

    def find_signal(self, cause: Event | None) -> int:
        """The signal that came to the ranks and by which they may have ended; 0: none. `cause`: as concluded."""
        if cause is not None and cause.kind != UNKNOWN:
            return cause.signal
        signals = [one.signal for one in self._reports.ranks.values()]
        if cause is not None and not all(signals):
            return 0  # the launcher has ended them for a reason of its own
        return next(filter(None, signals), 0)

    def _print_remarks(self) -> None:
        while self._reports.remarks:
            self._emit(self._reports.remarks.pop(0))

    def conclude(self, status: int) -> Event | None:
        """The first cause, once the launcher has ended with this status; None if all went well."""
        reports, until = self._reports, time.monotonic() + _LAST_WORDS_S
        reports.read()
        while not reports.all_over and time.monotonic() < until:
            time.sleep(0.02)
            reports.read()
        if status or reports.events or not reports.all_over:
            reports.finish()
        self._print_remarks()
        cause = find_first_cause(reports.events)
        reports.end_all()
        if cause is not None and cause.kind in {STUCK, LEFT} and self._ended_at is None and self._judges:
            self._emit(str(cause))  # the launcher was faster; no rank has reported it as its failure
        if not self._judges or (cause is None and reports.all_well):
            return None  # only the launcher itself did not end well: nothing is to be made again
        if status and (cause is None or cause.is_clean_up):
            return Event(UNKNOWN, -1, "", status=status, text=f"the launcher ended with status {status}")
        return cause


def watch(
    launcher: LauncherProcess,
    signals: Signals,
    emit: Callable[[str], None],
    came: Callable[[int], None],
    idle: Callable[[], None],
    of_ranks: tuple[SignalRelay, Teardown] | None = None,
) -> AttemptEnd:
    """Wait for the launcher's end, or bring it about where ranks do not end well. `of_ranks`: None where it starts
    none, and gets SIGTERM for each signal that comes. `came` is called with each signal, `idle` again and again."""
    relay, teardown = of_ranks or (None, None)
    poll = select.poll()
    for entry in (signals.entry, *([teardown.entry] if teardown else [])):
        poll.register(entry, select.POLLIN)
    last, came_at = "", 0.0
    while not launcher.has_ended:
        idle()
        waits_s = [_IDLE_S, *(one.poll(launcher) for one in (teardown, relay) if one)]
        poll.poll(min(waits_s) * 1000)
        for one in signals.read():
            is_again, last, came_at = last == name_signal(one), name_signal(one), time.monotonic()
            came(one)
            if teardown is None or relay is None:
                launcher.send(signal.SIGTERM)
                emit(f"{last} came")
            elif one == signal.SIGINT and is_again and relay.by_hand:
                emit("Ctrl-C again: the ranks are killed")
                teardown.kill()
            else:
                teardown.is_wish = True
                relay.receive(one)
    cause = teardown.conclude(launcher.status) if teardown else None
    if relay:
        relay.finish()
    if not ended_by(last, time.monotonic() - came_at):
        last = ""
    heard = teardown.find_signal(cause) if teardown and not last else 0
    if heard:
        emit(f"{name_signal(heard)} came to the ranks, and not to this script")
    return AttemptEnd(launcher.status, last, cause, name_signal(heard) if heard else "")
