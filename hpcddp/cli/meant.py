"""What a scheduler's or a launcher's option is called here. Loaded only once somebody has typed one."""

from __future__ import annotations

from hpcddp.script.fields import read_flag
from hpcddp.script.spec import KEYS

# Option of sbatch, qsub, srun, mpirun or torchrun -> the same here; a job file's key stands behind --set. What has
# blanks is a whole line to type: its numbers are other ones than those of the option.
_MEANT = {
    **dict.fromkeys(("--partition", "-p", "--qos", "-q"), "--queue"),
    **dict.fromkeys(("--project", "--group", "-A", "-P", "-g"), "--account"),
    **dict.fromkeys(("--time", "--time-limit", "-t"), "--walltime"),
    **dict.fromkeys(("--nnodes", "--num-nodes"), "--nodes"),
    **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node", "--nproc-per-node", "--ppn"), "--ranks-per-node"),
    **dict.fromkeys(("--ntasks", "-n", "--np", "-np"), "--nodes N --ranks-per-node R"),
    **dict.fromkeys(("--gpus", "-G", "--gres"), "--gpus-per-node G"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "--cpus-per-rank"),
    "--job-name": "--name",
    "-N": "--nodes N (Slurm's -N), or --name X (that of PBS)",
    "-J": "--name X (Slurm's -J), or --set array=1-10 (that of PBS)",
    "-l": "--nodes N --walltime TIME",
    "--mem": "--set mem_gb=512",
    "-o": "--set output=",
    "-a": "--set array=",
    "-d": "--set dependency=",
    "-C": "--set constraint=",
    "--image": "--set container=",
}


def find_meant(option: str, value: str) -> str | None:
    """What to type for an option that hpcddp does not have, with its value; None if it means nothing known."""
    key = option.removeprefix("--").replace("-", "_")
    meant = _MEANT.get(option) or (f"--set {key}=" if option.startswith("--") and key in KEYS else None)
    if KEYS.get(key) is read_flag:
        return f"--set {key}=true"
    if meant is not None and meant.endswith("="):
        return f"{meant}{value or 'VALUE'}"
    return f"{meant} {value or 'VALUE'}" if meant is not None and " " not in meant else meant
