"""Text to number and back for what a job asks for: durations, and counts.

A walltime is in seconds inside the program. People write `2:30:00`, `2h30m`, `1d` or `2-12:00:00`. A bare number is
refused, since sbatch takes it for minutes and qsub for seconds; so is `10:00`, which is minutes for Slurm and may be
hours for a reader.
"""

from __future__ import annotations

from hpcddp.errors import RequestError

_MOST_DIGITS = 18  # 64 bits; Python itself refuses to read thousands of digits, with a traceback
# Every form of a walltime. Each has one reading.
_WALLTIME = (
    r"(\d{1,9}:[0-5]?\d:[0-5]?\d|\d{1,9}-\d\d?(:[0-5]?\d){0,2}"
    r"|(?=\d)(\d{1,9}d)?(\d{1,9}h)?(\d{1,9}m)?(\d{1,9}s)?)"
)
_FORMS = "1:30:00 (hours:minutes:seconds), 90m, 1h30m or 2-00:00:00"


def read_number(text: str) -> int | None:
    """A whole number of 0 or more in ASCII digits, or None. `int` or `isdigit` alone take ², ٣, 1_0 or ' 1' too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def shorten(text: str) -> str:
    """Shorten a value to 60 characters, for an error's line."""
    return text if len(text) <= 60 else text[:57] + "..."


def strip_codes(text: str) -> str:
    """Remove a terminal's codes: colours, and links."""
    import re

    return re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])", "", text)


def printable(text: str) -> str:
    """Turn a text from elsewhere into one line of at most 400 characters that a terminal may show."""
    return "".join(c if c.isprintable() else " " for c in strip_codes(text))[:400]


def assign(where: str, value: str) -> str:
    """How to write `value` at its source: `--nodes 4` for an option, `--set nodes=4`, in a file `nodes: 4`."""
    key = where.partition(" in ")[0]
    if key.startswith("--set "):
        return f"{key}={value}"
    if key.startswith("--"):
        return f"{key} {value}"
    return f"{key}: {value}" if " in " in where else value


def parse_walltime(text: str, where: str = "walltime") -> int:
    """Seconds of `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, or of numbers with units, largest first: `90m`, `1d12h`.

    `where` names the source in errors: `--walltime`, `walltime in job.yaml`. Hours may exceed 24; minutes and seconds
    behind a colon stay below 60. Two fields and a bare number are refused: they have two readings.
    """
    import re

    text = text.strip()
    if not re.fullmatch(_WALLTIME, text, re.ASCII):
        raise RequestError(f"{where} {shorten(text)!r} is not a duration with one meaning", f"write it as {_FORMS}")
    if ":" in text or "-" in text:
        days, _, clock = text.rpartition("-")
        hours, minutes, seconds = map(int, [*clock.split(":"), "0", "0"][:3])
        total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    else:
        sizes = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        total = sum(int(number) * sizes[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    if total == 0:
        raise RequestError(f"{where} {text!r} is no time at all", assign(where, "1:30:00"))
    return total


def format_walltime(seconds: int) -> str:
    """`HH:MM:SS`, the one form that PBS, Slurm and Grid Engine all read alike."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def format_duration(seconds: float) -> str:
    """`HH:MM:SS`, as a walltime; of a time that is over: `00:00:00`."""
    return format_walltime(max(int(seconds), 0))


def format_count(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 micro batches`, `2 processes`, `2 epochs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('tch', 'ss')) else 's'}"


def parse_count(text: str, where: str) -> int:
    """A whole number of 1 or more; `where` names the option or key in the error."""
    number = read_number(text.strip())
    if number is None or number < 1:
        raise RequestError(f"{where} {shorten(text)!r} is not a whole number of 1 or more", assign(where, "4"))
    return number
