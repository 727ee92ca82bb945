"""The errors a person sees: two lines, never a traceback.

The first line says what is so, with the value and where it came from; the second is `hint:` and something to type.
The exit code says whose turn it is: 2 the request, 3 the site or its files, 4 the launch environment, 5 the scheduler,
6 another rank.
"""

from __future__ import annotations


class HpcddpError(Exception):
    """Base of all deliberate errors; `exit_code` is the process's exit status when it reaches the command line."""

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"


class RequestError(HpcddpError):
    """An invalid request: an option, a job file, a value."""

    exit_code = 2


class SiteError(HpcddpError):
    """The site is unknown, or its files (profile, templates) are wrong."""

    exit_code = 3


class LaunchError(HpcddpError):
    """The launch environment contradicts itself, or this process was not launched as a rank."""

    exit_code = 4


class SchedulerError(HpcddpError):
    """The scheduler said no."""

    exit_code = 5


class NoAnswerError(SchedulerError):
    """The scheduler's command has not ended in its time: it may have done all the same what it was asked to."""


#: The status of a rank that is well, but ends since another one failed.
PEER_FAILED = 6
#: The status of a job that left its run unfinished, and that no other job follows; and of a process without a job.
UNFINISHED = 85


def nearest(word: str, known: list[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`, or the empty string when none is near."""
    import difflib  # only when something is wrong already

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def find_missing_library(program: str, *names: str, extras: str = "train") -> LaunchError | None:
    """The error of `program`, as a person types it, for the first library that this Python does not have. Imports none
    of them. `extras`: of hpcddp, which bring them along."""
    import sys
    from importlib.util import find_spec

    for name in names:
        if find_spec(name) is None:
            return LaunchError(
                f"{program} needs {name}, which {sys.executable} does not have", f"pip install 'hpcddp[{extras}]'"
            )
    return None
