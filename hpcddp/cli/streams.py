"""What the command line says on stderr, and standard streams that are closed, full, no longer read, or that have an
encoding without some of the characters."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Iterable

from hpcddp.schedulers.registry import refused_lines

# They would move a terminal's cursor, or change its colours.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"}
_MOVING = bytes(code for code in (*range(32), 127) if chr(code) not in "\n\t")
_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def print_message(text: str) -> None:
    """`hpcddp: text` on stderr. If nobody listens, the exit status has to say it."""
    try:
        sys.stderr.write(_lay_out(text))
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def message_bytes(text: str) -> bytes:
    """The bytes that `print_message` would write."""
    return _lay_out(text).encode(sys.stderr.encoding, sys.stderr.errors or "strict")


def print_messages(remarks: Iterable[str]) -> None:
    """Several, each on a line of its own."""
    for remark in remarks:
        print_message(remark)


def _lay_out(text: str) -> str:
    text = f"{_painted('hpcddp:', _BOLD)} {text.translate(_CONTROL)}\n"
    return text.replace("\nhint:", f"\n{_painted('hint:', _CYAN)}")


def _painted(word: str, colour: str) -> str:
    """In colour on a terminal, unless NO_COLOR is set (https://no-color.org) or the terminal has no colours."""
    plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return word if plain else f"{colour}{word}{_PLAIN}"


def write_help(text: str) -> None:
    """Help on stdout; in a pipe or file behind lines that no scheduler and no shell takes for a job."""
    if not stat.S_ISCHR(os.fstat(1).st_mode):  # neither a terminal nor /dev/null
        text = no_job() + text
    sys.stdout.write(text)


def refuse_on_pipe() -> None:
    """Leave text on a pipe that no scheduler takes for a job: an empty pipe is an empty job."""
    if sys.stdout.closed or sys.stdout.isatty():
        return

    try:
        sys.stdout.write(refusal())
        sys.stdout.flush()
    except OSError:  # the reader has gone: nothing can be queued from this pipe
        forget_output()


def forget_output() -> None:
    """Python flushes what is left at its exit, and would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """How a character is written for people in an encoding that lacks it. Nothing is lost: `?` would say nothing."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no text
        return character.encode("utf-8", "surrogateescape"), error.start + 1
    return "..." if character == "…" else ascii(character)[1:-1], error.start + 1


def _keep_bytes(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return error.object[error.start : error.end].encode("utf-8", "surrogateescape"), error.end


def write_in_any_encoding() -> None:
    """Whatever a verb says to people can be written, in ASCII as well (PYTHONIOENCODING, LC_ALL=C)."""
    codecs.register_error("hpcddp.spell", _spell)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a caller of `main` has put another one
            stream.reconfigure(errors="hpcddp.spell")


def exact_bytes(text: str) -> bytes:
    """A text for programs: names in the bytes that the file system has for them, what it cannot have in UTF-8."""
    codecs.register_error("hpcddp.bytes", _keep_bytes)
    return text.encode(sys.getfilesystemencoding(), "hpcddp.bytes")


def write_exactly(text: str) -> None:
    """What a program reads on stdout, a job script or a path: the encoding of a terminal changes nothing in it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(exact_bytes(text))


def shown_bytes(line: bytes) -> bytes:
    """A line of somebody else's output: on a terminal without what moves its cursor or changes its colours, and of a
    progress bar what it showed last."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].translate(None, _MOVING) if sys.stdout.isatty() else line


def open_missing_streams() -> bool:
    """Whether standard output is there. What was closed (`>&-`, `2>&-`) is opened on nothing, so that no file that is
    opened later gets its number, and an error can be told without ado."""
    has_output = sys.stdout is not None
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)  # a program that is started next has it as well
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for the whole process
    return has_output


# Text that every reader of a job script refuses.


def refusal() -> str:
    """What a failed render and a mistyped verb leave on a pipe."""
    return refused_lines("hpcddp-render-failed") + "echo 'hpcddp: render failed, so there is no job here' >&2\nexit 2\n"


def no_job() -> str:
    """The first lines of a text for people that goes into a pipe or a file. In `less` they can be read past."""
    why = "exit 2  # the lines above keep schedulers from taking this text for a job, and this line bash"
    return f"{refused_lines('hpcddp-this-is-no-job-script')}{why}\n\n"
