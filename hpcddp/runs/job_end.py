"""`attempts/<name>/job.json`: which job an attempt runs in, and when that ends, as its supervisor knows it.

The ranks are told the same in their environment. People who look at the run from elsewhere read it here, without asking
the scheduler.
"""

from __future__ import annotations

from contextlib import suppress

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.jsonfile import DamagedFileError, read_record, write_object

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder


class JobEnd(Record):
    """`ends`: seconds since 1970; None: nothing ends the job. `source`: who says so. `warns`: when the ranks get the
    signal that the job file asks for; None: there is no such signal from hpcddp."""

    scheduler: str
    job: str  # the scheduler's id; "" on this machine
    ends: int | None = None
    source: str = ""
    warns: int | None = None


def note_job_end(attempt: AttemptFolder, end: JobEnd) -> None:
    """Replace the attempt's `job.json`. OSError if it cannot be written."""
    write_object(attempt.job, end._asdict())


def read_job_end(attempt: AttemptFolder) -> JobEnd | None:
    """None where no supervisor has written it, or it cannot be read as one. SchemaError if another hpcddp did."""
    with suppress(DamagedFileError):
        return read_record(attempt.job, JobEnd)
    return None
