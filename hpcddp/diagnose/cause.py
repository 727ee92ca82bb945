"""Why a job ended, and how that is shown."""

from __future__ import annotations

import re
import shlex

from hpcddp.diagnose.rows import CLASSES, NOBODY, Row
from hpcddp.record import Record
from hpcddp.units import printable

ALL = "all"


class Cause(Record):
    """Why a job ended. `class_`: one of CLASSES. `rank`: None where it is no rank's fault, or nobody says whose.
    `also`: classes that the logs alone cannot tell from it."""

    class_: str
    rank: int | str | None = None
    host: str = ""
    file: str = ""
    line: int | None = None
    text: str = ""
    whose: str = NOBODY
    remedy: str = ""
    also: tuple[str, ...] = ()


def cause_record(cause: Cause) -> dict[str, object]:
    record = cause._asdict()
    return {"class": record.pop("class_"), **record, "file": cause.file or None, "text": cause.text or None}


def name_cause(cause: Cause) -> str:
    """What and who, in a few words: `disk-full on rank 1 (node1)`."""
    who = "" if cause.rank is None else " on all ranks" if cause.rank == ALL else f" on rank {cause.rank}"
    where = f" ({cause.host})" if cause.host and cause.rank is not None else f" on {cause.host}" if cause.host else ""
    return f"{cause.class_}{f', or {chr(32).join(cause.also)}' if cause.also else ''}{who}{where}"


def show_line(cause: Cause) -> str:
    """The line that proves it, with its file and number, as a terminal may show it."""
    return f"{cause.file}:{cause.line}: {printable(cause.text)}" if cause.file else printable(cause.text)


def format_cause(cause: Cause, what: str) -> str:
    """What it is, the line that proves it, and what to type, for people."""
    lines = [f"{what}: {name_cause(cause)}: {CLASSES[cause.class_]}"]
    if cause.text:
        lines.append(f"  {show_line(cause)}")
    if cause.remedy:
        turn = "" if cause.whose == NOBODY else f" ({cause.whose})"
        lines.append(f"hint{turn}: {cause.remedy}")
    return "\n".join(lines) + "\n"


def fill_remedy(row: Row, line: str) -> str:
    """The remedy with what the line names, as words of a shell; capitals where it names nothing."""
    match = row.match(line)
    found = match.groupdict() if match is not None else {}

    def fill(name: re.Match[str]) -> str:
        words = (found.get(f"{name[1]}{end}") for end in ("", "_too", "_more"))
        word = next(filter(None, words), "").strip("'\" ")
        if name[1] == "hint":
            return printable(word)
        return shlex.quote(printable(word)) if word else name[1].upper()

    return re.sub(r"\{(\w+)\}", fill, row.remedy)
