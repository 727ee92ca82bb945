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
import os
import select
import time
from contextlib import suppress

from hpcddp.runs.heartbeat import make_page, read_supervised
from hpcddp.signals import ENDING
from hpcddp.supervisor.leftover import end_left, find_left, kill_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.runs.heartbeat import Supervised
else:
    import _signal as signal

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
