"""Which attempts of a run are the starts of one job, that go on where the one before was lost."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import job_of, list_holders, start_of
from hpcddp.runs.lock import read_end, read_holder

if TYPE_CHECKING:
    from hpcddp.runs.folder import AttemptFolder


def find_first_start(attempt: AttemptFolder) -> str:
    """The folder of the first attempt of this one's job; "" if no supervisor began this one.

    `hpcddp launch` that is typed again in one allocation, after the one before it has ended, is no start of that one's
    job. RequestError if the folder cannot be read; NewerFileError if a newer hpcddp wrote a holder.
    """
    job, first = job_of(attempt.name), ""
    for path in list_holders(attempt.run):
        holder = read_holder(path)
        if holder is None or not start_of(holder.attempt, job):
            continue
        first = first or holder.attempt
        if holder.attempt == attempt.name:
            return attempt.run.attempt(first).path
        if holder.by_hand and read_end(path)[0]:
            first = ""
    return ""
