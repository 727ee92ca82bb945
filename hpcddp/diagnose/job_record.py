"""The cause of an attempt's end: by its logs, and by what its supervisor or its scheduler wrote of that end."""

from __future__ import annotations

import re

from hpcddp.diagnose.cause import Cause
from hpcddp.diagnose.judge import diagnose
from hpcddp.diagnose.rows import CAUSE, CLASS_OF_SIGNAL, END, LATE, NO_WORD, NOBODY, OF_SIGNALS, PROGRAM, RECORD, ROWS
from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.logs import list_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcddp.runs.folder import AttemptFolder
    from hpcddp.runs.logs import LogFile


def diagnose_attempt(
    attempt: AttemptFolder, why: str, status: int | None, *, output: Sequence[LogFile] = (), has_failed: bool = True
) -> Cause:
    """The first cause of an attempt's end. `why`, `status`: what was written of it. `output`: the job's own. Without
    `has_failed` nobody says whether it failed."""
    cause = diagnose(list_sources(attempt, None), job_output=output, has_failed=has_failed)
    return add_record(cause, why, status)


def judge_record(reason: str, status: int | None, state: str = "") -> Cause:
    """The cause that a scheduler's record names, or what was written of a run's end; `unknown` where it names none."""
    text = "; ".join(filter(None, [reason, f"exit status {status}" if status else ""]))
    row = next((row for row in ROWS if row.level == RECORD and row.match(text or state)), None)
    if row is not None:
        return Cause(row.cause, text=text, whose=row.whose, remedy=row.remedy)
    if not status and state == "finished":
        return Cause("none", text=text)
    line = f"hpcddp: {reason}"  # as the supervisor has printed it
    for row in ROWS:
        match = row.match(line) if row.level in {CAUSE, LATE} and row.pattern.startswith("^hpcddp: ") else None
        if match is not None:
            found = {name.removesuffix("_too"): value for name, value in match.groupdict().items() if value}
            rank = int(found["rank"]) if "rank" in found else None
            return Cause(row.cause, rank, found.get("host", ""), text=reason, whose=row.whose, remedy=row.remedy)
    end = next((match for row in ROWS if row.level == END and (match := row.match(line))), None)
    if end is not None and (code := end.groupdict().get("status")) and int(code) < 128:
        return Cause("exit-status", int(end["rank"]), end["host"], text=reason, whose=PROGRAM, remedy=NO_WORD)
    number = (status or 0) - 256 if (status or 0) > 256 else (status or 0) - 128
    class_ = CLASS_OF_SIGNAL.get(number, "unknown")
    return Cause(
        class_, text=text, also=("killed",) if number == 9 else (), remedy=OF_SIGNALS.get(class_, (NOBODY, ""))[1]
    )


def add_record(cause: Cause, why: str, status: int | None) -> Cause:
    """The better of the cause that the logs show and that of `judge_record`: who has ended the ranks knows more than
    their logs, which show how they ended, and less than an error in them. A signal that the job got ended all ranks,
    whichever of them the launcher names."""
    if cause.class_ == "killed" and cause.rank is not None and why.startswith("SIG"):
        return cause._replace(rank=None, host="", file="", line=None, text=f"{why} to the job")
    said = judge_record(why, status)
    classes = {cause.class_, *cause.also}
    if "exit-status" in classes and said.class_ == "unknown" and re.match(r"(?!exit status).+\s", why):
        return cause._replace(file="", line=None, text=why)  # the supervisor's sentence says why there is a status
    is_better = (
        bool(classes & {"unknown", "none"})
        or ("killed" in classes and not why.startswith("SIG"))
        or ("exit-status" in classes and said.class_ in {"hang", "early-exit"})
        or (said.class_ == cause.class_ and said.rank is not None and cause.rank is None)
    )
    return said if is_better and said.class_ != "unknown" else cause
