"""What runs in each rank: the command, and the variables it gets."""

from __future__ import annotations

from itertools import pairwise

from hpcddp.errors import RequestError
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

# A command that starts ranks itself, under a launcher that starts one process per rank, makes N times N of them.
_LAUNCHERS = {"torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "srun", "aprun", "jsrun", "ibrun"}
_TRAINER = ("-m", "hpcddp.training.train")
# Set by the script, the launchers and hpcddp exec: a job's own value would be lost, or would break the ranks.
_OWN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT"}
_OWN_PREFIXES = ("HPCDDP_", "PBS_", "SLURM_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")


def plan_command(spec: JobSpec) -> tuple[str, ...]:
    """The words that each rank runs. The reference trainer gets the global batch as an argument."""
    command = spec.command or ()
    if not command:
        raise RequestError("there is no command to run", "put it last: hpcddp render … -- python train.py")
    program = command[0].rsplit("/", 1)[-1]
    if program in _LAUNCHERS or _follows(command, "-m", "torch.distributed.run", "torch.distributed.launch"):
        raise RequestError(
            f"the command starts its own ranks with {program}, under a launcher that makes one per rank already",
            "give the training script itself: -- python train.py (and --launcher torchrun if torchrun shall start it)",
        )
    if spec.global_batch and _follows(command, *_TRAINER) and "--global-batch" not in command:
        return (*command, "--global-batch", str(spec.global_batch))
    return command


def default_name(command: tuple[str, ...]) -> str:
    """A job without a name is called after its script, else after its program."""
    script = next((w for w in command if w.endswith((".py", ".sh"))), command[0])
    return script.rsplit("/", 1)[-1].removesuffix(".py").removesuffix(".sh") or "job"


def plan_variables(spec: JobSpec, site: Site) -> tuple[tuple[str, str], ...]:
    """The site's variables, then the job's, which win."""
    for name in spec.env or ():
        instead = {"PYTHONPATH": "use pythonpath: [FOLDER]", "PATH": "use python: or venv:"}.get(name)
        if name in _OWN or name.startswith(_OWN_PREFIXES) or instead:
            raise RequestError(f"env {name} is set by the job script itself", instead or f"leave {name} out of env")
    return tuple({**site.env, **(spec.env or {})}.items())


def _follows(command: tuple[str, ...], first: str, *seconds: str) -> bool:
    return any(a == first and b in seconds for a, b in pairwise(command))
