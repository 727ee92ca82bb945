"""Text to number and back for what a job asks for: durations, and counts.

A walltime is in seconds inside the program and `H:M:S` outside it. A bare number is refused: is it minutes, as for
sbatch, or seconds, as for qsub?
"""

from __future__ import annotations

from hpcddp.errors import RequestError

_WALLTIME_HINT = "write it as hours:minutes:seconds, for example 1:30:00"


_MOST_DIGITS = 18  # 64 bits; Python itself refuses to read thousands of digits, with a traceback


def read_number(text: str) -> int | None:
    """A whole number of 0 or more in ASCII digits, or None. `int` or `isdigit` alone take ², ٣, 1_0 or ' 1' too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def shorten(text: str) -> str:
    """At most 60 characters of a value, for an error's line."""
    return text if len(text) <= 60 else text[:57] + "..."


def parse_walltime(text: str, where: str = "walltime") -> int:
    """Seconds of `H:M:S`; hours may exceed 24, minutes and seconds stay below 60. `where` names the source in errors.

    Two fields, and a fourth (days), are refused: schedulers read them differently (Slurm takes 1:30 as minutes and
    seconds).
    """
    fields = text.strip().split(":")
    numbers = [number for field in fields if (number := read_number(field)) is not None]
    if len(fields) != 3 or len(numbers) != 3:
        raise RequestError(f"{where} {shorten(text)!r} is not H:M:S", _WALLTIME_HINT)
    hours, minutes, seconds = numbers
    if minutes > 59 or seconds > 59:
        raise RequestError(f"{where} {text!r} has minutes or seconds above 59", _WALLTIME_HINT)
    total = hours * 3600 + minutes * 60 + seconds
    if total == 0:
        raise RequestError(f"{where} {text!r} is no time at all", _WALLTIME_HINT)
    return total


def format_walltime(seconds: int) -> str:
    """`HH:MM:SS`, the one form that PBS, Slurm and Grid Engine all read alike."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def parse_count(text: str, where: str) -> int:
    """A whole number of 1 or more; `where` names the option or key in the error."""
    number = read_number(text.strip())
    if number is None or number < 1:
        raise RequestError(f"{where} {shorten(text)!r} is not a whole number of 1 or more", f"for example {where} 4")
    return number
