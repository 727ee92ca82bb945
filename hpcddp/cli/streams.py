"""Output of the command line: messages on stderr; on stdout text for people, or bytes for programs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable

from hpcddp.schedulers.registry import refused_lines

# They would move a terminal's cursor, or change its colours.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


def print_message(text: str) -> None:
    """Print `hpcddp: text` on stderr. If that cannot be written, the exit status has to say it."""
    try:
        sys.stderr.write(_format_message(text))
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def print_messages(remarks: Iterable[str]) -> None:
    for remark in remarks:
        print_message(remark)


def print_answer(record: object, text: str, *, as_json: bool, indent: int | None = None) -> None:
    """Print the answer of a verb on stdout: for programs as JSON, else as text for people."""
    if as_json:
        import json  # which `hpcddp exec` does without

        text = f"{json.dumps(record, indent=indent)}\n"
    sys.stdout.write(text)


def message_bytes(text: str) -> bytes:
    """The bytes that `print_message` would write."""
    return _format_message(text).encode(sys.stderr.encoding, "backslashreplace")


def _format_message(text: str) -> str:
    return f"hpcddp: {text.translate(_CONTROL)}\n"


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
    """Discard what is left: Python flushes it at its exit, and would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def write_in_any_encoding() -> None:
    """Let stdout take any text: characters that its encoding lacks are escaped, as on stderr."""
    if hasattr(sys.stdout, "reconfigure"):  # not where a caller of `main` has put another one
        sys.stdout.reconfigure(errors="backslashreplace")


def open_missing_streams() -> bool:
    """Open what was closed (`>&-`, `2>&-`) on nothing, so that no file that is opened later gets its number, and an
    error can be printed. Whether standard output is there."""
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


def write_exactly(text: str) -> None:
    """Write what a program reads, a job script or a path, in the file system's encoding, whatever the terminal's is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))


def shown_bytes(line: bytes) -> bytes:
    """A line of somebody else's output: on a terminal without what moves its cursor or changes its colours, and of a
    progress bar what it showed last."""
    if not sys.stdout.isatty():
        return line
    return line.rstrip(b"\r").rpartition(b"\r")[2].translate(None, bytes(_CONTROL))


def refusal() -> str:
    """The text that a failed render and a mistyped verb leave on a pipe, which every reader of a job script refuses."""
    return refused_lines("hpcddp-render-failed") + "echo 'hpcddp: render failed, so there is no job here' >&2\nexit 2\n"


def no_job() -> str:
    """The first lines of a text for people that goes into a pipe or a file. In `less` they can be read past."""
    why = "exit 2  # the lines above keep schedulers from taking this text for a job, and this line bash"
    return f"{refused_lines('hpcddp-this-is-no-job-script')}{why}\n\n"
