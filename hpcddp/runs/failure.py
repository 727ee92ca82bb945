"""How a rank has failed, by the end of its output. Tracebacks are read here, also for `diagnose`."""

from __future__ import annotations

import os
import re

from hpcddp.signals import name_signal
from hpcddp.units import strip_codes

TRACEBACK = "Traceback (most recent call last)"
#: The exception at a traceback's end.
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:_*[A-Z]\w*|timeout|gaierror|error)(?:: .*|:)?$")
_READ = 16384  # bytes of the end of a log
_MOST_LINES = 14
_WITHOUT_TRACEBACK = 6
#: torch's warnings in the C++ form, which it prints after a traceback: `[rank1]:[W1122 03:45:12 …] Warning: …`.
_REMARK = re.compile(r"(\[rank\d+\]:)?\[[WI]")


class Traceback:
    """A traceback, line after line. `prefix`: in front of each line, such as `[rank1]: `. `error`: its exception."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.frames: list[str] = []
        self.error = ""

    def add(self, line: str) -> bool:
        """Whether the line belongs to it."""
        if not line.startswith(self.prefix.rstrip()):
            return False
        body = line[len(self.prefix.rstrip()) :].removeprefix(":").removeprefix(" ") if self.prefix else line
        if body.startswith((" ", "\t")) or not body.strip():
            if 'File "' in body:
                self.frames.append(body)
            return True
        if EXCEPTION.match(body):
            self.error = body.strip()
        return self.error != ""


def find_prefix(head: str, below: str) -> str:
    """`head`, the text in front of a traceback's first line, if it is in front of the line `below`, too."""
    return head if head.strip() and below.startswith(f"{head}  File") else ""


def describe_end(status: int) -> str:
    """`ended with status 1`, `was killed by SIGKILL`: a wait status (`os.waitpid`) in words."""
    if not os.WIFSIGNALED(status):
        return f"ended with status {os.WEXITSTATUS(status)}"
    name = name_signal(os.WTERMSIG(status))
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")


def read_log_end(path: str, start: int) -> str:
    """The end of a log, of what was written from byte `start` on; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _READ))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def choose_lines(text: str) -> list[str]:
    """The lines that say what happened: the last traceback, shortened in its middle, else the last lines."""
    lines = [line.rstrip().rpartition("\r")[2] for line in strip_codes(text).split("\n")]
    lines = [line for line in lines if line.strip()]
    begin, end, _ = _find_traceback(lines)
    if not end:
        return lines[-_WITHOUT_TRACEBACK:]
    found = [line for line in lines[begin : end + _WITHOUT_TRACEBACK] if not _REMARK.match(line)]
    if len(found) <= _MOST_LINES:
        return found
    return [found[0], "  …", *found[2 - _MOST_LINES :]]


def choose_error(lines: list[str]) -> str:
    """The line that names the error: an exception, else the last one. Empty for hpcddp's own word without a hint."""
    *_, error = _find_traceback(lines)
    if error or not lines:
        return error
    has_hint = len(lines) > 1 and lines[-1].startswith("hint: ")
    last = next((line for line in reversed(lines) if not line.startswith("hint: ")), lines[-1])
    return "" if last.startswith("hpcddp: ") and not (has_hint or " failed: " in last) else last


def _find_traceback(lines: list[str]) -> tuple[int, int, str]:
    """First line, last line and exception of the last traceback, but for torchrun's report; else 0, 0 and ""."""
    found, begin, one = (0, 0, ""), 0, None
    for number, line in enumerate(lines):
        if TRACEBACK in line:
            begin, one = (
                number,
                Traceback(find_prefix(line.partition(TRACEBACK)[0], "".join(lines[number + 1 : number + 2]))),
            )
        elif one is not None and one.add(line) and one.error:
            if not one.error.startswith("torch.distributed.elastic."):
                found = begin, number, one.error
            one = None
    return found


def format_failure(rank: int, host: str, end: str, output: str, log: str) -> str:
    """The report. `output`: of `choose_lines`. `log`: the file with all of it; empty: the job's own output has it."""
    name = f"rank {rank} on {host} {end}"
    if not log:
        return f"{name}{'; the error is above' if output else ' and wrote no error'}"
    if not output:
        return f"{name} and wrote nothing; its log is {log}"
    shown = "".join(f"    {line}\n" for line in output.split("\n"))
    return f"{name}. The end of its output:\n{shown}  all of it: {log}"
