"""What `hpcddp render` costs beside other tools that write job scripts: CPU time of whole processes, in turn, same run.

Each peer comes from PyPI into a virtual environment of its own, .peers/NAME (rm -r .peers for the newest versions), and
prints a script for 4 nodes with 8 ranks each, or the nearest thing that it can without a scheduler. A peer that does
not install, import or print such a script is listed with the reason.
Usage: peers.py [--rounds N] [--check]; --check exits 1 when 9,400 nodes cost more than 1.1 times what 4 nodes cost, or
`render` costs more than submitit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from startup import SCRIPTS, clean_environment, cpu_ms

OUTSIDE = dict(os.environ)  # for pip, which may need its settings
VENVS = Path(__file__).parent.parent / ".peers"
MOST = 1.1  # what the largest job may cost, as a multiple of 4 nodes on the same site
OURS, SMALL, LARGEST = "generic-slurm", "frontier", "frontier, 9,400 nodes"


class Peer(NamedTuple):
    """A package on PyPI and the shortest program that has it print a script."""

    code: str
    expect: str  # in what it prints, once it has done its work
    remark: str
    pin: str | None = None  # to install as well, should the package alone fail


PEERS = {
    "submitit": Peer(
        """
from submitit.slurm.slurm import _make_sbatch_string
shape = dict(nodes=4, ntasks_per_node=8, gpus_per_node=8, cpus_per_task=8)
print(_make_sbatch_string("python train.py", "logs", "train", "gpu", 60, **shape))
""",
        "#SBATCH --nodes=4",
        "Slurm; a private function, the public ones need srun",
    ),
    "torchx": Peer(
        """
from torchx.components.dist import ddp
from torchx.schedulers.slurm_scheduler import create_scheduler
job = ddp(script="train.py", j="4x8", gpu=8, cpu=64, memMB=100000)
print(create_scheduler("torchx").submit_dryrun(job, {"partition": "gpu", "time": "60"}))
""",
        "#SBATCH --job-name=train-3",  # the fourth node's part
        "Slurm; a dry run from Python, its command scans for components as well",
    ),
    "psij-python": Peer(
        """
import sys
from datetime import timedelta
from psij import Job, JobAttributes, JobExecutor, JobSpec, ResourceSpecV1
shape = ResourceSpecV1(node_count=4, processes_per_node=8, cpu_cores_per_process=8, gpu_cores_per_process=1)
attributes = JobAttributes(duration=timedelta(hours=1), queue_name="gpu", account="abc123")
job = Job(JobSpec("python", ["train.py"], resources=shape, attributes=attributes, launcher="srun"))
slurm = JobExecutor.get_instance("slurm")
slurm.generate_submit_script(job, slurm._create_script_context(job), sys.stdout)
""",
        "#SBATCH --nodes=4",
        "Slurm; what submit() does before it calls sbatch",
    ),
    "dask-jobqueue": Peer(
        """
from dask_jobqueue import PBSCluster
select = "select=4:ncpus=64:mpiprocs=8:ngpus=8"
cluster = PBSCluster(cores=64, processes=8, memory="100GB", queue="gpu", walltime="1:00:00", resource_spec=select,
                     interface="lo", scheduler_options={"dashboard_address": None})
print(cluster.job_script())
""",
        "select=4:ncpus=64",
        "PBS; select typed by hand, starts dask's own scheduler",
    ),
    "nemo-run": Peer(
        """
import nemo_run as run
executor = run.SlurmExecutor(account="abc123", partition="gpu", nodes=4, ntasks_per_node=8, gpus_per_node=8,
                             time="01:00:00", packager=run.Packager(), tunnel=run.LocalTunnel(job_dir="jobs"))
with run.Experiment("train") as experiment:
    experiment.add(run.Script("train.py", entrypoint="python"), executor=executor)
    experiment.dryrun()
""",
        "#SBATCH --nodes=4",
        "Slurm; a dry run",
        pin="leptonai==0.27.3",
    ),
}


def hpcddp_commands() -> dict[str, list[str]]:
    """`hpcddp render` for 8 ranks on each of 4 nodes, but for the largest job."""
    shape = ["--queue", "gpu", "--ranks-per-node", "8", "--gpus-per-node", "8", "--cpus-per-rank", "8"]
    requests = {
        OURS: [OURS, "--nodes", "4", "--account", "abc123", *shape],
        "abci3": ["abci3", "--nodes", "4", "--account", "gaa50000"],
        SMALL: [SMALL, "--nodes", "4", "--account", "abc123"],
        LARGEST: [SMALL, "--nodes", "9400", "--account", "abc123"],
    }
    after = ["--walltime", "1:00:00", "--", "python", "train.py"]
    return {name: [str(SCRIPTS / "hpcddp"), "render", "--site", *args, *after] for name, args in requests.items()}


def reason(argv: list[str], cwd: str, expect: str) -> str | None:
    """Why this command does not do its work, in one line, or None."""
    ran = subprocess.run(argv, cwd=cwd, env=clean_environment(), capture_output=True, text=True)
    if ran.returncode != 0:
        return ((ran.stderr or ran.stdout).strip().splitlines() or [f"status {ran.returncode}"])[-1]
    return None if expect in ran.stdout else f"printed no {expect!r}"


def install(name: str, requirement: str) -> str | None:
    """Install it into .peers/<name>, and why that failed, in one line, or None."""
    python = VENVS / name / "bin/python"
    steps = [] if python.exists() else [[sys.executable, "-m", "venv", str(VENVS / name)]]
    steps.append([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement])
    for step in steps:
        ran = subprocess.run(step, env=OUTSIDE, capture_output=True, text=True)
        if ran.returncode != 0:
            return ((ran.stderr or ran.stdout).strip().splitlines() or [f"status {ran.returncode}"])[-1]
    return None


def isolate(folder: Path) -> None:
    """No settings of somebody's, and no scheduler's commands (torchx would ask sinfo), for hpcddp and peers alike."""
    (folder / "bin").mkdir()
    for program in ("bash", "mkdir"):  # NeMo-Run calls these
        (folder / "bin" / program).symlink_to(shutil.which(program))
    os.environ.update(HOME=str(folder), PATH=str(folder / "bin"))


def version(name: str) -> str:
    show = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.check_output([str(VENVS / name / "bin/python"), "-c", show], text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missing = {}
    for name in PEERS:
        print(f"installing {name}", file=sys.stderr)
        if why := install(name, name):
            missing[name] = why
    with tempfile.TemporaryDirectory() as cwd:
        (Path(cwd) / "train.py").touch()
        isolate(Path(cwd))
        argvs = {"python -c pass": [sys.executable, "-c", "pass"], **hpcddp_commands()}
        remarks = {OURS: "Slurm", "abci3": "PBS", SMALL: "Slurm", LARGEST: "Slurm"}
        for name, peer in PEERS.items():
            if name in missing:
                continue
            argv = [str(VENVS / name / "bin/python"), "-c", peer.code]
            why, remark = reason(argv, cwd, peer.expect), peer.remark
            note = VENVS / name / "pinned"  # why, for the runs to come
            if why and peer.pin and not note.exists():
                note.write_text(f"; with {peer.pin}, since alone: {why}")
                why = install(name, peer.pin) or reason(argv, cwd, peer.expect)
            remark += note.read_text() if note.exists() else ""
            if why:
                missing[name] = why
            else:
                label = f"{name} {version(name)}"
                argvs[label], remarks[label] = argv, remark
        for argv in argvs.values():  # byte code and disk cache
            cpu_ms(argv, cwd)
        before = os.getloadavg()[0]
        rounds = [{name: cpu_ms(argv, cwd) for name, argv in argvs.items()} for _ in range(options.rounds)]
    median = {name: statistics.median(one[name] for one in rounds) for name in argvs}
    print(
        f"CPU time in ms, median of {options.rounds} rounds, Python {sys.version.split()[0]}, "
        f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after\n"
    )
    print(f"{'':36}{'ms':>8}{'ratio':>8}  remark")
    for name in argvs:
        shown = f"hpcddp render, {name}" if name in hpcddp_commands() else name
        print(f"{shown:36}{median[name]:8.1f}{median[name] / median[OURS]:8.2f}  {remarks.get(name, '')}".rstrip())
    for name, why in missing.items():
        print(f"{name:36}{'-':>8}{'-':>8}  left out: {why}")
    targets = [(f"{LARGEST} / 4 nodes", LARGEST, SMALL, MOST)]
    targets += [(f"render / {name}", OURS, name, 1.0) for name in argvs if name.startswith("submitit ")]
    print()
    missed = 0
    for what, ours, other, most in targets:
        ratio = median[ours] / median[other]
        quietest = min(one[ours] for one in rounds) / min(one[other] for one in rounds)
        missed += ratio > most
        outcome = "ok" if ratio <= most else "MISSED"
        print(f"{what}: {ratio:.2f}, of the fastest rounds {quietest:.2f} (target {most})  {outcome}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
