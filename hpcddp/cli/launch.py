"""`hpcddp launch -- command …`: run a command on every rank of the allocation this shell is in.

It is `render` and `bash` in one, with nodes and ranks taken from the allocation instead of a request: the script is the
one that `render` would print, so a run started by hand leaves the same run folder as a batch job.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import on_path, origin
from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.allocation import Allocation, find_allocation
from hpcddp.ranks.candidates import find_candidates
from hpcddp.ranks.device import visible_devices
from hpcddp.script.choose import Choice, open_site
from hpcddp.script.plan import plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Account, Site
from hpcddp.script.spec import read_spec
from hpcddp.units import parse_count, read_number

_DESCRIPTION = """\
Run a command on every rank of the allocation this shell is in (qsub -I, salloc, or inside a batch script).

The exit status is the launcher's, which is the command's; 85 if training stopped in time and is to be continued."""

# scheduler of the allocation -> the site whose template has its launcher lines
_SITES = {"pbs": "generic-pbs", "slurm": "generic-slurm"}
# How each mpirun or mpiexec answers --version (Open MPI 4's mpiexec says OpenRTE).
_FLAVOURS = (
    *(("Open MPI", "openmpi"), ("OpenRTE", "openmpi"), ("PRRTE", "openmpi")),
    *(("Intel(R) MPI", "intelmpi"), ("HYDRA", "mpich"), ("PALS", "pals")),
)


class Room(NamedTuple):
    """What there is to run on: nodes, and of each node the slots that the scheduler gave, CPUs and GPUs."""

    nodes: int
    slots: int
    cpus: int
    gpus: int


def build_parser() -> VerbParser:
    """The options of `hpcddp launch`."""
    parser = VerbParser("launch", _DESCRIPTION)
    parser.usage = "hpcddp launch [options] -- command [argument ...]"
    parser.add_argument("--ranks-per-node", metavar="R", help="processes per node (what the allocation was asked for)")
    parser.add_argument("--launcher", metavar="L", help="openmpi, mpich, intelmpi, srun or torchrun (what is found)")
    parser.add_argument("--site", metavar="S", help="a site whose modules and environment the ranks need")
    parser.add_argument("--name", metavar="X", help="the run's name, and its folder's below runs/ (the command's)")
    parser.add_argument("--walltime", metavar="H:M:S", help="time left in the allocation, for a checkpoint in time")
    parser.add_argument("--global-batch", metavar="B", help="samples per optimizer step, over all ranks")
    parser.add_argument("--here", action="store_true", help="run on this machine, although it has a scheduler")
    parser.add_argument("--dry-run", action="store_true", help="print the script instead of running it")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Plan for what is here, render, and become the shell that runs it."""
    if not args.command:
        raise RequestError("there is no command to run", "hpcddp launch -- python train.py")
    _refuse_inside_a_rank(env)
    allocation = None if args.here else find_allocation(env)
    if allocation is None and not args.here:
        _refuse_beside_a_scheduler(env)
    site = _site(args.site, allocation, env)
    room = _room(allocation, env)
    # One slot per node is what a scheduler gives when nobody asked: then each GPU gets its rank.
    ranks = room.slots if room.slots > 1 else max(room.gpus, 1)
    if args.ranks_per_node is not None:
        ranks = parse_count(args.ranks_per_node, "--ranks-per-node")
    asked: dict[str, tuple[object, str]] = {
        "nodes": (str(room.nodes), "the allocation"),
        "ranks_per_node": (str(ranks), "--ranks-per-node"),
        "gpus_per_node": (str(room.gpus), "the visible devices"),
        "cpus_per_node": (str(max(room.cpus, ranks)), "this machine"),
        "launcher": (args.launcher or _launcher(site, env), "--launcher"),
        "workdir": (os.getcwd(), "the folder of this shell"),
        "command": (args.command, "the command after --"),
    }
    for key in ("name", "walltime", "global_batch"):
        if getattr(args, key) is not None:
            asked[key] = (getattr(args, key), f"--{key.replace('_', '-')}")
    if args.walltime is None and "SLURM_JOB_END_TIME" not in env:
        asked["walltime"] = ("168:00:00", "the default of hpcddp launch")
        if allocation is not None:
            print("hpcddp: the end of this allocation is not known; --walltime H:M:S gives it", file=sys.stderr)
    plan = plan_job(read_spec(asked), site, origin())
    _refuse_another_dialect(plan.starter, plan.starter_program, site, env)
    if plan.starter == "srun" and _may_wait_for_itself(env):
        print(
            f"hpcddp: this shell is step {env['SLURM_STEP_ID']} of its job and may hold what the ranks need: if srun"
            " waits (step creation temporarily disabled), export SLURM_OVERLAP=1, which is srun --overlap",
            file=sys.stderr,
        )
    script = render_script(plan)
    if args.dry_run:
        sys.stdout.write(script)
        return 0
    print(f"hpcddp: {plan.world_size} ranks on {plan.nodes} nodes, by {plan.launcher}", file=sys.stderr)
    sys.stderr.flush()
    os.execvpe("bash", ["bash", "-c", script, "hpcddp-launch"], dict(env))
    raise AssertionError("exec returned")  # it does not: it replaces this process or raises


def _refuse_inside_a_rank(env: Mapping[str, str]) -> None:
    inside = [c for c in find_candidates(env) if (c.size or 1) > 1]
    if inside:
        raise LaunchError(
            f"this process is a rank already ({inside[0].describe()}); each of them would start a launcher of its own",
            "use `hpcddp exec -- command` inside a rank, or `hpcddp launch` outside the launcher",
        )


def _refuse_beside_a_scheduler(env: Mapping[str, str]) -> None:
    for program in ("qsub", "sbatch"):
        if on_path(program, env):
            raise LaunchError(
                f"this shell is in no allocation, and this machine has a scheduler ({program} is on PATH)",
                "ask for nodes (qsub -I or salloc), or run on this machine alone: hpcddp launch --here -- command",
            )


def _site(named: str | None, allocation: Allocation | None, env: Mapping[str, str]) -> Site:
    """The site of the options, else the generic one of the allocation's scheduler. Nothing is queued: no account."""
    if allocation is not None and allocation.scheduler not in _SITES:
        raise LaunchError(
            f"launch has no launcher line for {allocation.scheduler}",
            "start the ranks yourself: mpirun -np N hpcddp exec -- command",
        )
    own = "local" if allocation is None else _SITES[allocation.scheduler]
    site = open_site(Choice(named, "--site") if named else Choice(own, "the allocation"), env)
    if allocation is not None and site.scheduler != allocation.scheduler:
        raise RequestError(
            f"site {site.name} has {site.scheduler}, but this allocation is of {allocation.scheduler}", f"--site {own}"
        )
    return dataclasses.replace(site, account=Account())


def _room(allocation: Allocation | None, env: Mapping[str, str]) -> Room:
    gpus = _count_gpus(env)
    cpus = len(os.sched_getaffinity(0))
    if allocation is None:
        return Room(1, 1, cpus, gpus)
    if allocation.hosts is None:
        raise LaunchError(
            f"{allocation.scheduler} job {allocation.job_id} does not say on which hosts it runs",
            "run `hpcddp launch` in the job's own shell, where its variables are set",
        )
    counts = {slots for _, slots in allocation.hosts}
    if len(counts) > 1:
        raise LaunchError(
            f"the allocation has {min(counts)} to {max(counts)} slots per host ({allocation.source})",
            "ask for the same number on every node",
        )
    if allocation.scheduler == "slurm":
        cpus = read_number(env.get("SLURM_CPUS_ON_NODE", "")) or cpus
    return Room(len(allocation.hosts), counts.pop(), cpus, gpus)


def _count_gpus(env: Mapping[str, str], devices: str = "/dev") -> int:
    """Those that the scheduler's mask shows; without a mask, NVIDIA's that this machine has."""
    for mask in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        visible = visible_devices(env, mask)
        if visible is not None:
            return len(visible)
    names = os.listdir(devices)
    return sum(name.startswith("nvidia") and read_number(name.removeprefix("nvidia")) is not None for name in names)


def _launcher(site: Site, env: Mapping[str, str]) -> str:
    """srun under Slurm; else whatever mpirun is on PATH, by its own word; else torchrun."""
    if site.scheduler == "slurm":
        return site.launcher.name
    mpirun = _search("mpirun", site, env, "openmpi") or _search("mpiexec", site, env, "openmpi")
    if mpirun is None:
        return "torchrun"
    found, answer = _flavour_of(mpirun)
    if found is None:
        raise LaunchError(
            f"{mpirun} --version names no known MPI: {answer!r}",
            "say which it is: --launcher openmpi, mpich or intelmpi",
        )
    return found


def _search(program: str, site: Site, env: Mapping[str, str], launcher: str) -> str | None:
    """Where the script will find this program: the site's goes before the environment's, but for Open MPI on this
    machine alone (templates/base.sh.j2, local.sh.j2)."""
    folders = [env.get("PATH", ""), os.path.dirname(sys.executable)]
    if site.scheduler == "local" and launcher == "openmpi":
        folders.reverse()
    return on_path(program, {"PATH": ":".join(folders)})


def _flavour_of(mpirun: str) -> tuple[str | None, str]:
    """Whose mpirun this is, by its own word, and that word."""
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False)
    said = answer.stdout or answer.stderr
    return next((launcher for words, launcher in _FLAVOURS if words in said), None), said.partition("\n")[0]


def _refuse_another_dialect(launcher: str, program: str, site: Site, env: Mapping[str, str]) -> None:
    """Each MPI's mpirun has options of its own: another one would stop at the first, or read it otherwise. Modules that
    the script loads may bring the right one, which cannot be seen from here."""
    found = _search(program, site, env, launcher) if program and not site.modules.load else None
    flavour, _ = _flavour_of(found) if found else (None, "")
    if flavour is not None and flavour != launcher:
        raise LaunchError(
            f"the script's line is for {launcher}, but {found} belongs to {flavour}, which takes other options",
            f"--launcher {flavour}, or put the folder of {launcher}'s {program} first on PATH",
        )


def _may_wait_for_itself(env: Mapping[str, str]) -> bool:
    """Whether this shell is a step that holds resources (srun --pty bash). salloc's own interactive step, whose id is
    one of Slurm's highest numbers, holds none."""
    step = read_number(env.get("SLURM_STEP_ID", ""))
    return step is not None and step < 0xFFFFFFF0 and env.get("SLURM_OVERLAP", "") not in {"1", "yes"}
