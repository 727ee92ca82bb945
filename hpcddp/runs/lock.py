"""One attempt at a time writes a run: it holds the run from its start to its end.

`holders/000001`, `000002`, … are the attempts that have held the run; the last one holds it until it says that it has
ended, or is found to have. The folder with the next number is made under another name and renamed, which succeeds once
on any file system.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress

from hpcddp.errors import LaunchError
from hpcddp.processes import find_machine, process_lives, start_time
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import RunFolder, cannot_write, job_of, list_folders, list_numbered, show_path, start_of
from hpcddp.runs.jsonfile import TIME_FORMAT, DamagedFileError, format_now, read_file, read_record, write_object
from hpcddp.schedulers.job_id import JobId, parse_id
from hpcddp.schedulers.registry import find_current_job, find_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    #: (scheduler, job id) -> the job's state in the words that all schedulers share; None: it cannot be found out
    Ask = Callable[[str, str], str | None]

#: A job in one of these states has no process any more. `gone`: its scheduler does not know it any more.
_FINAL_STATES = frozenset({"finished", "cancelled", "failed", "gone"})
#: In the name of an attempt that `hpcddp launch` began in an allocation: one job may have several.
BY_HAND = "-launch"
_LONGEST_END = 1000  # bytes of what a holder says at its end
_TRIES = 100  # each one that fails means that another attempt has taken the run meanwhile, or set its folder aside
_MOVED = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}  # what a folder that was renamed meanwhile gives


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

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else f"attempt {self.attempt}"
        return f"{job} on {self.host} (process {self.process}, since {self.since})"

    @property
    def since_s(self) -> float | None:
        """`since` in seconds since 1970; None where it is not said."""
        from datetime import datetime  # no rank needs it

        with suppress(ValueError):
            return datetime.strptime(self.since, TIME_FORMAT).timestamp()
        return None

    @property
    def lives(self) -> bool | None:
        """Whether its process does; None if that cannot be seen from here."""
        return process_lives(self.process, self.started, self.host, self.machine)

    @property
    def by_hand(self) -> bool:
        """Whether `hpcddp launch` began it in a job, which may have more attempts at once."""
        return self.job != "" and BY_HAND in job_of(self.attempt)

    @property
    def id(self) -> JobId:
        """The id of the job, or of the process. Jobs of a Slurm array have numbers of their own: the attempt's name has
        the array's id and the index."""
        named, mine = parse_id(job_of(self.attempt)), parse_id(self.job or job_of(self.attempt))
        if not named.array_index or mine.array_index:
            return mine
        raw = "" if mine.number == named.number else mine.number
        return named.at(named.array_index, find_scheduler(self.scheduler).commands.of_index)._replace(raw=raw)


def describe_process(attempt: str, process: int, env: Mapping[str, str], command: tuple[str, ...]) -> Holder:
    """Describe this attempt as a holder: `process` lives as long as the attempt, and runs on this host."""
    job = find_current_job(env)
    scheduler, number = (job.scheduler, job.id) if job is not None and job.id else ("", "")
    host, started = os.uname().nodename, start_time(process)
    return Holder(attempt, host, find_machine(), process, started, scheduler, number, command, format_now())


def has_ended(holder: Holder, mine: Holder, ask: Ask) -> bool | None:
    """Whether the holder's processes are gone; None if that cannot be found out from here. On its own machine its
    process decides. Of one job's attempts one begins only when the one before is over. Another job's scheduler is
    asked."""
    alive = holder.lives
    if alive is not None and holder.machine == mine.machine:
        return not alive or (holder.process, holder.started) == (mine.process, mine.started)
    job = job_of(mine.attempt)
    if 0 < start_of(holder.attempt, job) <= start_of(mine.attempt, job):
        return True
    if holder.job and (holder.scheduler, holder.job) != (mine.scheduler, mine.job):
        state = ask(holder.scheduler, holder.job)
        return None if state is None else state in _FINAL_STATES
    return True if alive is False else None


class HolderEnd(Record):
    """`status`: the exit status. `signal`: that ended it. `cause`: why it has failed. None and "": not known."""

    status: int | None = None
    signal: str = ""
    cause: str = ""


class HeldError(LaunchError):
    """Another attempt holds the run, or may. `holder`: which; None: its record cannot be read."""

    holder: Holder | None = None


class Hold(Record):
    """The content of a folder below `holders/`. `end`: None of an attempt that has not ended, or was killed."""

    path: str
    holder: Holder
    end: HolderEnd | None

    @property
    def begin_s(self) -> float:
        return self.holder.since_s or os.stat(_name_record(self.path)).st_mtime

    @property
    def end_s(self) -> float | None:
        return os.stat(_name_end(self.path)).st_mtime if self.end is not None else None


def take_run(run: RunFolder, mine: Holder, ask: Ask, before: str = "") -> None:
    """Hold the run, and remove what killed writers have left of checkpoints. HeldError if another attempt does;
    LaunchError if the folder cannot be written. `before`: the name of the job that queued this one, and has ended."""
    for tries in reversed(range(_TRIES)):
        try:
            left = _list_left(run)  # before the holder is read: it is not that of whoever takes the run meanwhile
            path = _find_last(run)
            number = int(os.path.basename(path)) + 1 if path is not None else 1
            before_me = _identify(path)
            if path is not None and not os.path.exists(_name_end(path)):
                holder = read_holder(path)
                follows = holder is not None and before != "" and job_of(holder.attempt) == before
                ended = holder is not None and (follows or has_ended(holder, mine, ask))
                if not ended:
                    raise _make_error(run, path, holder, mine, surely=ended is False)
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            if not _create(_name_holder(run, number), mine):
                continue
            if _identify(path) == before_me:
                return
            shutil.rmtree(_name_holder(run, number))  # --fresh has set aside the folder that was looked at
        except OSError as error:
            if error.errno not in _MOVED or not tries:
                raise cannot_write(run, error) from error
    raise LaunchError(f"other jobs take {run.path} all the time", "another name for this one: --name X")


def _identify(path: str | None) -> int:
    with suppress(FileNotFoundError):
        return os.stat(path).st_ino if path is not None else 0
    return 0


def is_held_by(run: RunFolder, attempt: str) -> bool:
    path, holder = _read_last(run)
    return holder is not None and holder.attempt == attempt and not os.path.exists(_name_end(path))


def check_not_taken(run: RunFolder, attempt: str) -> None:
    """HeldError if another attempt has taken the run from this one: its script was killed, and its ranks lived on."""
    _, holder = _read_last(run)
    if holder is not None and holder.attempt != attempt:
        raise HeldError(
            f"run {show_path(run.path)} was taken by {holder} from attempt {attempt}, which writes no more",
            f"end what is left of attempt {attempt}; the run continues in the other one",
        )


def release_run(run: RunFolder, attempt: str, status: int | None = None, signal: str = "", cause: str = "") -> None:
    """Record how this attempt has ended; nothing if it does not hold the run. If the file cannot be written, later jobs
    find the end out by themselves."""
    path, holder = _read_last(run)
    if holder is None or holder.attempt != attempt:
        return
    line = f"{'' if status is None else status} {signal}".rstrip()
    text = f"{line}\n{cause}\n" if line or cause else ""
    with suppress(OSError):
        # a file system that is full takes it as well: the file is as long as it was made, and has another name
        with open(_name_reserve(path), "r+b", buffering=0) as file:
            file.write(text.encode(errors="replace")[:_LONGEST_END].ljust(_LONGEST_END))
        os.rename(_name_reserve(path), _name_end(path))


def read_holder_end(path: str) -> HolderEnd | None:
    """Read what the holder in this folder wrote at its end; None if it has not ended, or was killed."""
    try:
        line, _, cause = read_file(_name_end(path)).partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    status, _, by = line.partition(" ")
    return HolderEnd(int(status) if status.strip().isdecimal() else None, by.strip(), cause.strip())


def name_end(run: RunFolder) -> str:
    return show_path(_name_end(_find_last(run) or ""))


def read_holds(run: RunFolder) -> list[Hold]:
    """Read the holds of a run, oldest first, without those whose holder cannot be read."""
    found = ((path, read_holder(path)) for path in list_numbered(run.holders))
    return [Hold(path, holder, read_holder_end(path)) for path, holder in found if holder is not None]


def read_holder(path: str) -> Holder | None:
    """Read a holder; None if the file cannot be read as one. SchemaError if another hpcddp wrote it."""
    with suppress(DamagedFileError):
        return read_record(_name_record(path), Holder)
    return None


def _read_last(run: RunFolder) -> tuple[str, Holder | None]:
    path = _find_last(run)
    return (path, read_holder(path)) if path is not None else ("", None)


def _find_last(run: RunFolder) -> str | None:
    return next(reversed(list_numbered(run.holders)), None)


def _name_holder(run: RunFolder, number: int) -> str:
    return os.path.join(run.holders, f"{number:06d}")


def _list_left(run: RunFolder) -> list[str]:
    """Checkpoints that were not completed, or not wholly removed."""
    folders = list_folders(run.checkpoints)
    return [entry.path for entry in folders if re.match(r"step-[^.]*\.(tmp|old)-", entry.name)]


def _create(path: str, mine: Holder) -> bool:
    """Whether this attempt became the holder in this folder."""
    partial = os.path.join(os.path.dirname(path), f".{mine.attempt}-{mine.host}-{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    write_object(_name_record(partial), mine._asdict(), durable=True)
    with open(_name_reserve(partial), "wb") as file:
        file.write(b" " * _LONGEST_END)
    try:
        os.rename(partial, path)
    except OSError:
        # a network file system may repeat a request whose answer was lost, and refuse what it has done
        taken = read_holder(path) == mine
        shutil.rmtree(partial, ignore_errors=True)
        if not taken and not os.path.isdir(path):
            raise
        return taken
    return True


def _name_record(path: str) -> str:
    return os.path.join(path, "holder.json")


def _name_end(path: str) -> str:
    return os.path.join(path, "ended")


def _name_reserve(path: str) -> str:
    return os.path.join(path, "ended.tmp")


def _make_error(run: RunFolder, path: str, holder: Holder | None, mine: Holder, *, surely: bool) -> HeldError:
    import shlex

    other, touch = "a run of its own: --name X, or another run_dir", f"touch {_name_end(path)}"
    if holder is None:
        return HeldError(f"{path} does not say who holds the run", f"if nobody does: {touch}; or {other}")
    differs = ""
    if holder.command and mine.command and holder.command != mine.command:
        differs = f"; it runs {shlex.join(holder.command)}, and this is {shlex.join(mine.command)}"
    name = show_path(run.path)
    if surely:
        what, hint = f"run {name} is in use by {holder}, and one attempt at a time holds a run", "wait for its end"
    else:
        what = f"run {name} was taken by {holder}, and whether that has ended cannot be found out on this host"
        hint = f"if it has ended: {touch}"
    error = HeldError(f"{what}{differs}", f"{hint}; or {other}")
    error.holder = holder
    return error
