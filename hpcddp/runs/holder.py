"""Which process holds a run: a job by its id, a process by its host, number and start time; and whether it still is."""

from __future__ import annotations

import os

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import job_of, start_of
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import find_current_job, find_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    #: (scheduler, job id) -> the job's state in the words that all schedulers share; None: it cannot be found out
    Ask = Callable[[str, str], str | None]

#: A job in one of these states has no process any more. `gone`: its scheduler does not know it any more.
ENDED = frozenset({"finished", "cancelled", "failed", "gone"})


class Holder(Record):
    """One attempt as the holder of its run. `machine` says which kernel and process namespace `process` belongs to."""

    attempt: str
    host: str
    machine: str
    process: int
    started: str  # when the process started, in the kernel's clock ticks; "": not known
    scheduler: str = ""
    job: str = ""  # the scheduler's id; "": not a job's
    command: tuple[str, ...] = ()
    since: str = ""
    by_hand: bool = False  # one of several starts in one job
    within: str = ""  # of a run that a script of a job chose itself: the folder of the job's first attempt
    restart: int = 0  # how often the launcher itself had started the ranks again in this attempt, as torchrun does
    job_start: str = ""  # which start of the job this is of, by `find_job_start`; "": not known

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else f"attempt {self.attempt}"
        return f"{job} on {self.host} (process {self.process}, since {self.since})"

    @property
    def id(self) -> JobId:
        """The id of the job, or of the process as its attempts have it. All jobs of a Slurm array have numbers of their
        own, and the names of their attempts have its id and the index."""
        named, own = parse_id(job_of(self.attempt)), parse_id(self.job or job_of(self.attempt))
        if not named.array_index or own.array_index:
            return own
        raw = "" if own.number == named.number else own.number
        return named.at(named.array_index, find_scheduler(self.scheduler).commands.of_index)._replace(raw=raw)

    @property
    def start(self) -> tuple[int, int]:
        """Which start of the ranks in its job this is."""
        return start_of(self.attempt, job_of(self.attempt)), self.restart


def describe_process(
    attempt: str,
    process: int,
    env: Mapping[str, str],
    command: tuple[str, ...],
    *,
    by_hand: bool = False,
    within: str = "",
    restart: int = 0,
) -> Holder:
    """This attempt as a holder: `process` is what lives as long as it does, and runs on this host."""
    import time

    job = find_current_job(env)
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    host = os.uname().nodename
    started = start_time(process)
    return Holder(
        attempt,
        host,
        find_machine(),
        process,
        started,
        job.scheduler if job and job.id else "",
        job.id if job else "",
        command,
        since,
        by_hand,
        within,
        restart,
        find_job_start(env),
    )


def find_job_start(env: Mapping[str, str]) -> str:
    """What differs between the starts of a job that its scheduler starts again, and is the same for all scripts that
    run in one start; "" outside of a job, or if the system does not say. Without a count: the session of the job's own
    script or shell."""
    job = find_current_job(env)
    if job is None or not job.id:
        return ""
    if of_start := find_scheduler(job.scheduler).variables.of_start:
        return " ".join(env.get(name, "") for name in of_start)
    session = os.getsid(0)
    started = start_time(session)
    return f"{find_machine()} {session} {started}" if started else ""


def has_ended(holder: Holder, mine: Holder, ask: Ask) -> bool | None:
    """Whether the holder's processes are gone; None if that cannot be found out from here.

    On its own machine its process decides; what this very process held has ended. Elsewhere its job does: `mine`, if it
    is another start of the same job, was started again. An earlier attempt of the job that `mine` is within is over, on
    whatever host: the supervisor begins the next one only after it has ended it, or cut it off.
    """
    if mine.within and holder.within == mine.within and holder.start[0] < mine.start[0]:
        return True
    same_host = holder.host == mine.host and holder.machine != ""
    if same_host and holder.machine == mine.machine and holder.started:
        is_mine = (holder.process, holder.started) == (mine.process, mine.started)
        return is_mine or start_time(holder.process) != holder.started
    if holder.job:
        if (holder.scheduler, holder.job) == (mine.scheduler, mine.job):
            is_same_start = mine.job_start != "" and holder.job_start == mine.job_start
            return None if mine.by_hand or is_same_start else True
        state = ask(holder.scheduler, holder.job)
        return None if state is None else state in ENDED
    # the same kernel: another process namespace, which cannot be looked into; another one: the host has started anew
    if same_host and holder.machine.partition(" ")[0] != mine.machine.partition(" ")[0]:
        return True
    return None


def find_machine() -> str:
    """`<boot id> <process namespace>`; "" where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(process: int) -> str:
    """When this process started, in clock ticks since the system did; "" if there is no such process."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
