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

# The record holds these, the launchers' variables and the schedulers'. It holds nothing else, and no secret.
_RECORDED = ("HPCDDP_", "CUDA_", "HIP_", "ROCR_", "ZE_", "NCCL_", "GLOO_", "FI_", "UCX_", "OMP_")
_NFS_DELAY_S = 65.0  # NFS keeps for a minute, as delivered, that a folder was not there
_LOOK_S = 0.5
_HINT = "the run folder must be on a file system that every node shares; set run_dir in the job file"
_SECRET = ("COOKIE", "TOKEN", "SECRET", "PASSWORD", "JWT", "KEY", "CRED")


class RankLog(Record):
    """The file of a rank's output. `start` is its size in bytes after earlier starts."""

    path: str
    start: int


def record_rank(env: Mapping[str, str], rank: int, hostname: str) -> RankLog | None:
    """Record the launch environment, and send all output but rank 0's to a file of its own. LaunchError if it cannot.
    None: the output stays where it was."""
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
            f"rank {rank} on {host} cannot write to the run folder {attempt.path!r}: {error.strerror}", _HINT
        ) from error
    return None


def _check_shared(attempt: AttemptFolder, rank: int, host: str) -> None:
    """LaunchError if this host does not see the folder that the supervisor made on another one."""
    if job_of(attempt.name) == attempt.name:
        return  # it was not the supervisor that named it
    end = time.monotonic() + _NFS_DELAY_S
    while not os.path.isdir(attempt.path):
        if time.monotonic() > end:
            raise LaunchError(f"rank {rank} on {host} does not see the run folder of this job, {attempt.path!r}", _HINT)
        if os.path.isdir(attempt.run.attempts):
            os.listdir(attempt.run.attempts)  # asks the server anew
        time.sleep(_LOOK_S)


def is_recorded(name: str) -> bool:
    """Whether the run folder has the value of a variable of this name."""
    launchers = (prefix for row in LAUNCHERS.values() for prefix in row.prefixes)
    prefixes = (*_RECORDED, *launchers, *(prefix for row in all_schedulers() for prefix in row.variables.prefixes))
    # a command's words may be secret
    return name.startswith(prefixes) and name != COMMAND and not any(word in name.upper() for word in _SECRET)
