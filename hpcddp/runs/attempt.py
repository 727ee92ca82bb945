"""Files of one rank in the attempt's folder: its launch environment and its log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from hpcddp.errors import LaunchError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import Record
from hpcddp.runs.folder import COMMAND, AttemptFolder, find_attempt, job_of
from hpcddp.schedulers.registry import all_schedulers
from hpcddp.signals import name_signal
from hpcddp.units import strip_codes

# The record holds these, the launchers' variables and the schedulers'. It holds nothing else, and no secret.
_RECORDED = ("HPCDDP_", "CUDA_", "HIP_", "ROCR_", "ZE_", "NCCL_", "GLOO_", "FI_", "UCX_", "OMP_")
_NFS_DELAY_S = 65.0  # NFS keeps for a minute, as delivered, that a folder was not there
_LOOK_S = 0.5
_SECRET = ("COOKIE", "TOKEN", "SECRET", "PASSWORD", "JWT", "KEY", "CRED")


class RankLog(Record):
    """The file of a rank's output. `start` is its size in bytes after earlier starts."""

    path: str
    start: int


def record_rank(env: Mapping[str, str], rank: int, hostname: str) -> RankLog | None:
    """Record the launch environment, and send all output but rank 0's to a file of its own. LaunchError if it cannot.

    Outside of an attempt nothing is written. None: the output stays where it was.
    """
    attempt = find_attempt(env)
    if attempt is None:
        return None
    host = hostname.partition(".")[0]
    _check_shared(attempt, rank, host)
    record, log = attempt.rank_environment(rank), attempt.rank_log(rank, host)
    try:
        os.makedirs(os.path.dirname(record), exist_ok=True)
        with open(record, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{name}={env[name]}\0" for name in filter(is_recorded, sorted(env)))
        if env.get("HPCDDP_LOG_RANKS") == "1" and rank != 0:
            os.makedirs(os.path.dirname(log), exist_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return RankLog(log, os.fstat(output).st_size)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} on {host} cannot write to the run folder {attempt.path!r}: {error.strerror}",
            "the run folder must be on a file system that every node shares; set run_dir in the job file",
        ) from error
    return None


def _check_shared(attempt: AttemptFolder, rank: int, host: str) -> None:
    """LaunchError if this host does not see the folder that the supervisor made on another one: each would write its
    own run. A shared file system may show it a while late."""
    if job_of(attempt.name) == attempt.name:
        return  # it was not the supervisor that named it
    end = time.monotonic() + _NFS_DELAY_S
    while not os.path.isdir(attempt.path):
        if time.monotonic() > end:
            raise LaunchError(
                f"rank {rank} on {host} does not see the run folder of this job, {attempt.path!r}",
                "the run folder must be on a file system that every node shares; set run_dir in the job file",
            )
        if os.path.isdir(attempt.run.attempts):
            os.listdir(attempt.run.attempts)  # asks the server anew
        time.sleep(_LOOK_S)


def is_recorded(name: str) -> bool:
    """Whether the run folder has the value of a variable of this name."""
    launchers = (prefix for row in LAUNCHERS.values() for prefix in row.prefixes)
    prefixes = (*_RECORDED, *launchers, *(prefix for row in all_schedulers() for prefix in row.variables.prefixes))
    # a command's words may be secret
    return name.startswith(prefixes) and name != COMMAND and not any(word in name.upper() for word in _SECRET)


# How a rank has failed, for the job's own output: ranks other than 0 write to files that nobody watches.


_READ = 16384  # bytes of the end of a log
_MOST_LINES = 14
_WITHOUT_TRACEBACK = 6
_TRACEBACK = "Traceback (most recent call last)"


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
    begin, error, _ = _find_traceback(lines)
    if begin is None:
        return lines[-_WITHOUT_TRACEBACK:]
    stop = None if error is None else error + _WITHOUT_TRACEBACK
    found = [line for line in lines[begin:stop] if not _is_remark(line)]
    if len(found) <= _MOST_LINES:
        return found
    return [found[0], "  …", *found[2 - _MOST_LINES :]]


def choose_error(lines: list[str]) -> str:
    """The one of them that names the error, as the program wrote it: a traceback's exception with the first line of
    what it says, whatever else was written then. Empty if none does, as where hpcddp's own word on the run is the last.
    """
    has_hint = False
    for line in reversed(lines):
        told = line.partition("]: ")[2] if line.startswith("[rank") else line
        if told.startswith("hint: "):
            has_hint = True
            continue
        if told.startswith("hpcddp: "):
            return "" if not has_hint and " failed: " not in told else told
        _, error, before = _find_traceback(lines)
        return told if error is None else lines[error].removeprefix(before)
    return ""


def _find_traceback(lines: list[str]) -> tuple[int | None, int | None, str]:
    """Find the last traceback: its first line, the line of its exception, and the prefix of each of its lines, such as
    `[rank1]: `. Torchrun's report on its ranks' end is none."""
    import re

    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    for begin in reversed(begins):
        before = lines[begin].partition(_TRACEBACK)[0]
        if not any(line.startswith(f"{before} ") for line in lines[begin + 1 :]):
            before = ""  # of the first line alone: a logger's, or the frame around it
        for number in range(begin + 1, len(lines)):
            told = lines[number].removeprefix(before)
            if lines[number].startswith(before) and re.match(r"[^\W\d][\w.<>]*(: |:?$)", told):
                if told.startswith("torch.distributed.elastic."):
                    break
                return begin, number, before
    return (begins[-1] if begins else None), None, ""


def format_failure(rank: int, host: str, end: str, output: str, log: str) -> str:
    """The report. `output`: as `choose_lines` gives it. `log`: the file with the rank's output; empty: what it wrote is
    on the job's own output already."""
    name = f"rank {rank} on {host} {end}"
    if not log:
        return f"{name}{'; the error is above' if output else ' and wrote no error'}"
    if not output:
        return f"{name} and wrote nothing; its log is {log}"
    shown = "".join(f"    {line}\n" for line in output.split("\n"))
    return f"{name}. The end of its output:\n{shown}  all of it: {log}"


def _is_remark(line: str) -> bool:
    """torch's warnings in the C++ form, which it prints after a traceback: `[rank1]:[W1122 03:45:12 …] Warning: …`."""
    if line.startswith("[rank"):
        line = line.partition("]:")[2]
    return line.startswith(("[W", "[I"))
