"""Who calls the supervisor, until it has said which rank it is: it may be anybody, such as a scan of ports."""

from __future__ import annotations

from contextlib import suppress

from hpcddp.record import TYPE_CHECKING
from hpcddp.supervisor.sockets import accept, open_listener, receive

if TYPE_CHECKING:
    import _socket
    import select

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
