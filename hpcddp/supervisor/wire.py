"""Messages between the processes of a job: of the supervisor and each rank's agent, and of `hpcddp check` and the
processes that it starts (`checks/`); and the address where the supervisor listens.

Each class below is a message: one line of text, which is the message's name and its fields with blanks between. Nothing
else knows how a line looks. A line that is no message is left out by who reads it.

The agent begins a connection with `hello`. The supervisor answers each `hello` and each `beat` with `ok` or `kill`.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.hang import Stand
from hpcddp.runs.heartbeat import Beat

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hpcddp.runs.folder import AttemptFolder

# ---- from the agent to the supervisor; and `Beat` and `Stand`, which the rank writes and the agent passes on


class Hello(Record):
    """The caller. `key`: as the supervisor's file has it. `rank`: NO_RANK and a `world_size` of 0 where the environment
    does not say which one it is."""

    key: str
    attempt: str
    rank: int
    world_size: int
    host: str


class PlainStand(Record):
    """The place where a rank of a plain script stands, of which an agent may have several. No line: it reports nothing
    more."""

    rank: int
    world_size: int
    line: str
    inside: str
    seconds: float
    waits: int
    collectives: int
    quiet_s: float

    @property
    def stand(self) -> Stand:
        return Stand(self.line, self.inside, self.seconds, self.waits, self.collectives, self.quiet_s)


class Stacks(Record):
    """The answer to `ask`, of one rank: its stacks as `faulthandler` writes them, or why it has none. `left`: how many
    further ranks of this agent follow."""

    request: str
    left: int
    rank: int
    text: str
    why: str


class Signalled(Record):
    """A signal came to the rank, or to its agent, that the supervisor has not sent."""

    number: int


class Ended(Record):
    """The rank's program has ended with this wait status; the supervisor closes the connection, or answers `wait`.
    `output`: the lines of its output that say why, where it failed. `log`: the file with all of it, or "".
    `is_printed`: on the job's output. `unheard_s`: the agent had not heard the supervisor for so long, and ended it."""

    status: int
    output: str = ""
    log: str = ""
    is_printed: bool = False
    unheard_s: int = 0


# ---- from the supervisor to the agent


class Ok(Record):
    """The answer to a message that was read."""


class Kill(Record):
    """Kill the rank, and what it has started."""


class Until(Record):
    """The job ends at another time now, in seconds since 1970."""

    at: float


class Give(Record):
    """Give the rank this signal, the `nth` of its attempt: all are sent again on a new connection."""

    nth: int
    number: int


class Ask(Record):
    """A request for the stacks of the agent's ranks. `request`: its name. Each rank is answered for by `stacks`."""

    request: str


class Wait(Record):
    """Other ranks still save, or have still to say how they failed, and the launcher would kill them at the agent's
    end: stay until the connection is closed, at most for so long."""

    seconds: float


# ---- between `hpcddp check` and its processes, in both directions


class Content(Record):
    """An order, or its answer: a JSON object."""

    text: str


_FROM_AGENT: tuple[Any, ...] = (Hello, Beat, Stand, PlainStand, Stacks, Signalled, Ended)
_FROM_SUPERVISOR: tuple[Any, ...] = (Ok, Kill, Until, Give, Ask, Wait)
#: Name -> the message.
MESSAGES = {message.__name__.lower(): message for message in (*_FROM_AGENT, *_FROM_SUPERVISOR, Content)}
_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: bool(int(text)),
    "str": lambda text: _unescape(text),
}
_ESCAPES = (("%", "%25"), (" ", "%20"), ("\n", "%0A"))  # in a text

if TYPE_CHECKING:
    _FromAgent = Hello | Beat | Stand | PlainStand | Stacks | Signalled | Ended
    Message = _FromAgent | Ok | Kill | Until | Give | Ask | Wait | Content


def write(message: Message) -> bytes:
    """The message's line."""
    fields = [_escape(str(int(one) if isinstance(one, bool) else one)) for one in message]
    return f"{' '.join([type(message).__name__.lower(), *fields])}\n".encode(errors="replace")


def read(line: bytes) -> Message | None:
    """The message of a line without its end; None: it is none."""
    name, *texts = line.decode(errors="replace").split(" ")
    kind = MESSAGES.get(name)
    if kind is None or len(texts) != len(kind._fields):
        return None
    types = kind.__annotations__.values()
    with suppress(ValueError):
        message: Message = kind(*[_TYPES[one](text) for one, text in zip(types, texts, strict=True)])
        return message
    return None


class Incoming:
    """The messages of one connection, whose lines may come in parts."""

    def __init__(self) -> None:
        self.rest = b""  # of a line that is not complete

    def add(self, data: bytes = b"") -> list[Message]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [message for message in map(read, lines) if message is not None]


def _escape(text: str) -> str:
    for character, written in _ESCAPES:
        text = text.replace(character, written)
    return text


def _unescape(text: str) -> str:
    for character, written in reversed(_ESCAPES):
        text = text.replace(written, character)
    return text


class SupervisorAddress(Record):
    """Where an attempt's supervisor listens. `hosts`: names and addresses of its host. `key`: shows that a caller may
    read this file. `every_s`: between an agent's messages. `lease_s`: a rank whose supervisor is silent for so long
    ends itself, since another attempt may have started; 0: never."""

    port: int
    key: str
    every_s: float
    lease_s: float
    hosts: tuple[str, ...]


def write_supervisor_address(attempt: AttemptFolder, address: SupervisorAddress) -> None:
    """Write where the supervisor listens, for this user's ranks alone. OSError if the folder cannot be written."""
    *values, hosts = address
    file = os.open(_path(attempt), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, "".join(f"{line}\n" for line in (*values, *hosts)).encode())
    finally:
        os.close(file)


def read_supervisor_address(attempt: AttemptFolder) -> SupervisorAddress | None:
    with suppress(OSError, ValueError), open(_path(attempt), encoding="utf-8") as file:
        port, key, every_s, lease_s, *hosts = file.read().split()
        return SupervisorAddress(int(port), key, float(every_s), float(lease_s), tuple(hosts))
    return None


def _path(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "supervisor")
