"""What one rank leaves in the attempt's folder before it becomes its command: its launch environment and its log."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hpcddp.errors import LaunchError

# What launchers, schedulers and devices set. Everything else, and every secret, stays out of the record.
_RECORDED = (
    *("HPCDDP_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYD", "I_MPI_", "MV2_", "MVP_", "PALS_", "FLUX_"),
    *("JSM_", "SLURM", "PBS_", "SGE_", "LSB_", "PJM_", "PE_HOSTFILE", "NSLOTS", "NHOSTS", "JOB_ID", "TORCHELASTIC_"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_"),
    *("CUDA_", "HIP_", "ROCR_", "ZE_", "NCCL_", "GLOO_", "FI_", "UCX_", "OMP_"),
)
_SECRET = ("COOKIE", "TOKEN", "SECRET", "PASSWORD", "JWT", "KEY", "CRED")


def attempt_folder(env: Mapping[str, str]) -> str | None:
    """The folder of this attempt, which the rendered script names; None outside of one.

    LaunchError if the name is no folder's: it must not lead out of the run folder.
    """
    run_dir, name = env.get("HPCDDP_RUN_DIR"), env.get("HPCDDP_ATTEMPT")
    if name and ("/" in name or name in {".", ".."}):
        raise LaunchError(f"HPCDDP_ATTEMPT={name!r} is no name of a folder", "unset HPCDDP_ATTEMPT; job scripts set it")
    return os.path.join(run_dir, "attempts", name) if run_dir and name else None


def record_rank(env: Mapping[str, str], rank: int, hostname: str) -> None:
    """Keep the launch environment, and send all output but rank 0's to a file of its own. LaunchError if it cannot."""
    folder = attempt_folder(env)
    if folder is None:
        return
    host = hostname.partition(".")[0]
    record = os.path.join(folder, "env", f"rank-{rank:04d}.env")
    log = os.path.join(folder, "logs", f"rank-{rank:04d}.{host}.log")
    try:
        os.makedirs(os.path.dirname(record), exist_ok=True)
        with open(record, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{name}={value}\0" for name, value in sorted(env.items()) if _may_be_recorded(name))
        if env.get("HPCDDP_LOG_RANKS") == "1" and rank != 0:
            os.makedirs(os.path.dirname(log), exist_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} on {host} cannot write to the run folder {folder!r}: {error.strerror}",
            "the run folder must be on a file system that every node shares; set run_dir in the job file",
        ) from error


def is_first_to_fail(env: Mapping[str, str]) -> bool:
    """Whether this rank tells the whole job that its command cannot be run; the others tell their own logs.

    Rank 0 cannot be the one: a launcher kills it as soon as another rank has failed.
    """
    folder = attempt_folder(env)
    if folder is None:
        return True
    try:
        os.close(os.open(os.path.join(folder, "not-started"), os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    return True


def _may_be_recorded(name: str) -> bool:
    return name.startswith(_RECORDED) and not any(word in name.upper() for word in _SECRET)
