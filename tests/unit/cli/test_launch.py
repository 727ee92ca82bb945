"""`hpcddp launch`: the script it makes for what is here. Real launches are in tests/multirank."""

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.login.planning import detect_spawn
from hpcddp.ranks.device import count_visible_gpus
from hpcddp.ranks.predict import predict_environment
from hpcddp.script.spec import JobSpec

_PATH = "/usr/bin:/bin"


def launch(tmp_path: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which becomes the launcher; a dry run in this one."""
    env = {"PATH": _PATH, "HOME": str(tmp_path), "TMPDIR": os.environ["TMPDIR"]} | env
    if "--dry-run" not in argv:
        words = [sys.executable, "-m", "hpcddp", "launch", *argv]
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(tmp_path)
        patch.setattr(os, "environ", env)
        patch.setattr(sys, "argv", ["hpcddp", "launch", *argv])
        status = main(["launch", *argv])
        out.flush()
        err.flush()
    said, told = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(argv, status, said, told)


def scheduler_in(folder: Path, program: str) -> str:
    """A PATH on which this scheduler command stands; it is looked for and never run."""
    (folder / program).write_text("#!/bin/sh\nexit 1\n")
    (folder / program).chmod(0o755)
    return f"{folder}:{_PATH}"


def pbs_job(tmp_path: Path, *hosts: str) -> dict[str, str]:
    nodefile = tmp_path / "nodefile"
    nodefile.write_text("".join(f"{host}\n" for host in hosts))
    return {"PBS_JOBID": "47.pbs1", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_NODEFILE": str(nodefile)}


@pytest.mark.parametrize(
    ("code", "who"),
    [
        ("from hpcddp.cli.main import main; sys.exit(main(sys.argv[1:]))", "hpcddp launch by torchrun"),
        ("import hpcddp; hpcddp.runtime(global_batch=8)", "hpcddp.runtime()"),
    ],
)
def test_without_torch_two_lines_say_what_is_missing(tmp_path: Path, code: str, who: str) -> None:
    argv = ["launch", "--here", "--launcher", "torchrun", "--ranks-per-node", "2", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {code}", *argv],
        env={"PATH": _PATH, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    what, hint = done.stderr.splitlines()
    assert what == f"hpcddp: {who} needs torch, which {sys.executable} does not have"
    assert hint.startswith("hint: pip install 'hpcddp[train]'")


@pytest.mark.parametrize("program", ["qsub", "sbatch"])
def test_a_login_node_is_refused_unless_here_is_said(tmp_path: Path, program: str) -> None:
    path = scheduler_in(tmp_path, program).removesuffix(f":{_PATH}")  # this machine may have a real one
    said = launch(tmp_path, "--dry-run", "--", "true", PATH=path)
    assert said.returncode == 4
    assert f"this shell is in no allocation, and this machine has a scheduler ({program} is on PATH)" in said.stderr
    assert "--here" in said.stderr
    assert launch(tmp_path, "--here", "--dry-run", "--", "true", PATH=path).returncode == 0


def test_an_interactive_pbs_job_gets_its_nodes_and_slots(tmp_path: Path) -> None:
    said = launch(
        tmp_path, "--dry-run", "--launcher", "openmpi", "--", "true", **pbs_job(tmp_path, *["a.x"] * 4, *["b.x"] * 4)
    )
    assert said.returncode == 0, said.stderr
    assert "-np 8" in said.stdout
    assert "--map-by ppr:4:node" in said.stdout
    assert '-hostfile "$PBS_NODEFILE"' in said.stdout


def test_open_mpi_is_told_where_an_allocation_has_fewer_slots_than_ranks(tmp_path: Path) -> None:
    asked = ("--ranks-per-node", "2", "--dry-run", "--launcher", "openmpi", "--", "true")
    two = launch(tmp_path, *asked, **pbs_job(tmp_path, "a.x", "b.x"))
    assert "--map-by ppr:2:node:OVERSUBSCRIBE --bind-to none" in two.stdout, two.stderr
    one = launch(tmp_path, *asked, **pbs_job(tmp_path, "a.x"))
    assert "--map-by slot:OVERSUBSCRIBE --bind-to none" in one.stdout, one.stderr
    enough = launch(tmp_path, *asked, **pbs_job(tmp_path, "a.x", "a.x"))
    assert "--map-by ppr:2:node --bind-to none" in enough.stdout, enough.stderr


def test_uneven_slots_are_refused_with_both_counts(tmp_path: Path) -> None:
    said = launch(tmp_path, "--dry-run", "--", "true", **pbs_job(tmp_path, "a", "a", "b"))
    assert said.returncode == 4
    assert "1 to 2 slots per host" in said.stderr


def test_the_name_is_made_of_the_command_once_and_stands_in_the_script(tmp_path: Path) -> None:
    """Before any of its placeholders is filled, so that each start of the script has the same run."""
    line = ("--here", "--dry-run", "--launcher", "torchrun")
    said = launch(tmp_path, *line, "--", "python", "t.py", "--lr", "7", "--out", "{run_dir}")
    again = launch(tmp_path, *line, "--", "python", "t.py", "--lr", "7", "--out", "{run_dir}")
    assert re.search(r' supervise --script "\$0" --name t-lr7-out\+run_dir-[0-9a-f]{10} ', said.stdout), said.stdout
    assert said.stdout == again.stdout
    refused = launch(tmp_path, *line, "--name", "a b", "--", "true")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "hint: --name a_b"


def test_a_slurm_allocation_gets_srun(tmp_path: Path) -> None:
    said = launch(
        *(tmp_path, "--dry-run", "--", "true"),
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_TASKS_PER_NODE="4(x2)",
        SLURM_CPUS_ON_NODE="32",
    )
    assert said.returncode == 0, said.stderr
    assert "srun --nodes=2 --ntasks=8 --ntasks-per-node=4" in said.stdout
    assert "--cpus-per-task=8" in said.stdout


@pytest.mark.parametrize(
    ("counts", "each"),
    [
        ("8(x2)", 4),
        ("16,4", 2),
    ],
)
def test_salloc_on_the_login_node_says_the_cpus_of_the_nodes(tmp_path: Path, counts: str, each: int) -> None:
    said = launch(
        *(tmp_path, "--ranks-per-node", "2" if each > 1 else "1", "--dry-run", "--", "true"),
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_TASKS_PER_NODE="1(x2)",
        SLURM_JOB_CPUS_PER_NODE=counts,
    )
    assert said.returncode == 0, said.stderr
    assert f"--cpus-per-task={each}" in said.stdout


@pytest.mark.parametrize(
    ("mask", "count"), [({}, 2), ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3), ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0)]
)
def test_gpus_are_those_of_the_mask_else_the_machines(tmp_path: Path, mask: dict[str, str], count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_visible_gpus(mask, str(tmp_path)) == count


def test_the_gpus_of_an_allocation_have_to_be_seen_and_those_of_this_machine_may_be_left(tmp_path: Path) -> None:
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "2"}
    assert "hpcddp exec --gpus-per-node 2 -- " in launch(tmp_path, "--dry-run", "--", "true", **two, **slurm).stdout
    assert "hpcddp exec -- " in launch(tmp_path, "--here", "--dry-run", "--", "true", **two).stdout


def test_each_rank_can_have_several_gpus(tmp_path: Path) -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    said = launch(tmp_path, "--here", "--gpus-per-rank", "2", "--dry-run", "--", "true", **eight)
    assert "\nexport HPCDDP_GPUS_PER_RANK=2\n" in said.stdout, said.stderr
    assert "# Nodes 1, ranks per node 4," in said.stdout
    said = launch(tmp_path, "--here", "--gpus-per-rank", "2", "--", "true", CUDA_VISIBLE_DEVICES="")
    assert said.stderr.splitlines()[-1].startswith("hint: leave out gpus_per_rank")


def test_a_rank_does_not_launch_again(tmp_path: Path) -> None:
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    rank |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    said = launch(tmp_path, "--dry-run", "--", "true", **rank)
    assert said.returncode == 4
    assert "this process is a rank already (openmpi: rank 0 of 2" in said.stderr


@pytest.mark.parametrize("outer", ["openmpi", "srun"])
def test_where_launchers_nest_the_rank_is_the_innermost_ones(tmp_path: Path, outer: str) -> None:
    agent = predict_environment(outer, ["node1", "node2"], [1, 1], 1)
    inner = predict_environment("torchrun", ["node1", "node2"], [2, 2], 3)
    said = launch(tmp_path, "--dry-run", "--", "true", **agent, **inner)
    assert said.returncode == 4
    assert "this process is a rank already (torchrun: rank 3 of 4" in said.stderr


@pytest.mark.parametrize("argv", [[], ["--here", "--set", "chain=2", "--", "true"]])
def test_wrong_requests_are_answered_in_two_lines(tmp_path: Path, argv: list[str]) -> None:
    said = launch(tmp_path, *argv)
    assert said.returncode == 2
    assert len(said.stderr.splitlines()) == 2


@pytest.mark.multirank
def test_the_exit_status_is_the_commands(tmp_path: Path) -> None:
    path = f"{os.path.dirname(sys.executable)}:{_PATH}"
    said = launch(tmp_path, "--here", "--ranks-per-node", "2", "--", "sh", "-c", "exit $((RANK * 7))", PATH=path)
    assert said.returncode == 7, said.stderr


def mpirun_of(folder: Path, program: str, says: str) -> str:
    (folder / program).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / program).chmod(0o755)
    return f"{folder}:{_PATH}"


@pytest.mark.parametrize(
    ("says", "flavour"), [("mpirun (Open MPI) 4.1.8", "openmpi"), ("PALS version 1.2.12", "pals"), ("HYDRA", "mpich")]
)
def test_the_line_of_one_mpi_is_not_given_to_the_mpiexec_of_another(tmp_path: Path, says: str, flavour: str) -> None:
    path = mpirun_of(tmp_path, "mpiexec.hydra", says)
    said = launch(tmp_path, "--here", "--launcher", "intelmpi", "--dry-run", "--", "true", PATH=path)
    assert said.returncode == 4
    assert f"for intelmpi, but {tmp_path}/mpiexec.hydra belongs to {flavour}, which takes other options" in said.stderr
    assert f"hint: --launcher {flavour}, or put the folder of intelmpi's mpiexec.hydra first on PATH" in said.stderr


def test_what_is_left_of_a_pbs_job_is_the_walltime(tmp_path: Path) -> None:
    started = time.time() - 1800
    said = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(started))
    job = {"job_state": "R", "stime": said, "Resource_List": {"walltime": "02:00:00"}}
    (tmp_path / "qstat").write_text(f"#!/bin/sh\necho '{json.dumps({'Jobs': {'47.pbs1': job}})}'\n")
    (tmp_path / "qstat").chmod(0o755)
    line = ("--dry-run", "--launcher", "openmpi", "--", "true")
    done = launch(tmp_path, *line, **pbs_job(tmp_path, "a.x"), PATH=f"{tmp_path}:{_PATH}")
    assert "the end of this allocation is not known" not in done.stderr
    (found,) = re.findall(r"^#PBS -l walltime=01:(\d\d):\d\d$", done.stdout, re.MULTILINE)
    assert int(found) <= 30
    asked = launch(tmp_path, "--walltime", "1h", *line, **pbs_job(tmp_path, "a.x"), PATH=f"{tmp_path}:{_PATH}")
    assert "#PBS -l walltime=01:00:00" in asked.stdout


def test_the_limits_of_a_sites_queues_are_not_about_an_allocation_that_is_there(tmp_path: Path) -> None:
    line = ("--site", "polaris", "--walltime", "2m", "--dry-run", "--", "true")
    done = launch(tmp_path, *line, **pbs_job(tmp_path, "a.x"))
    assert done.returncode == 0, done.stderr


SPAWN = """import torch.multiprocessing as mp
def main(rank): print("rank", rank, flush=True)
if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


def test_a_script_that_starts_the_ranks_itself_is_seen_behind_what_starts_it(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(SPAWN)
    spec = JobSpec(command=(*["uv", "run", "--python", "3.12", "spawn.py", "--config", "c.py"],), workdir=str(tmp_path))
    assert detect_spawn(spec)[0].ranks == "node"


def test_a_script_that_starts_its_ranks_runs_once_per_node(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(SPAWN)
    (tmp_path / "both.py").write_text(f'import os\nos.environ.get("RANK")\n{SPAWN}')
    once = launch(tmp_path, "--here", "--dry-run", "--ranks-per-node", "2", "--", "python", "spawn.py")
    assert "spawn.py:4 starts a node's ranks itself: the job starts it once (ranks: node)" in once.stderr
    assert "hpcddp exec --nodes 1 --ranks-per-node 2 --" in once.stdout
    each = launch(tmp_path, "--here", "--dry-run", "--set", "ranks=each", "--", "python", "spawn.py")
    assert "hpcddp exec -- " in each.stdout, each.stderr
    both = launch(tmp_path, "--here", "--dry-run", "--ranks-per-node", "2", "--", "python", "both.py")
    assert "hpcddp exec -- " in both.stdout
    two = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    refused = launch(tmp_path, "--dry-run", "--", "python", "spawn.py", **two)
    assert (refused.returncode, "numbers them from 0 on each of 2 nodes" in refused.stderr) == (2, True)


def test_the_commands_own_number_of_ranks_is_taken(tmp_path: Path) -> None:
    said = launch(tmp_path, "--here", "--dry-run", "--", "torchrun", "--nproc-per-node=2", "train.py")
    assert "hpcddp exec --nodes 1 --ranks-per-node 2 --" in said.stdout, said.stderr


@pytest.mark.parametrize(
    ("command", "what", "hint"),
    [
        (["train.py"], "the command starts with train.py, which is no program on PATH", "-- python train.py"),
        (["python", "trian.py"], "the command's script 'trian.py' is not in FOLDER", "correct the path"),
    ],
)
def test_a_command_that_cannot_be_started_makes_no_run_folder(
    tmp_path: Path, command: list[str], what: str, hint: str
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    said = launch(tmp_path, "--here", "--", *command)
    lines = [f"hpcddp: {what.replace('FOLDER', str(tmp_path))}", f"hint: {hint}"]
    assert (said.returncode, said.stderr.splitlines()) == (2, lines)
    assert not (tmp_path / "runs").exists()


def test_launch_scratch_keeps_no_folder(tmp_path: Path) -> None:
    code = "import os, sys; print(os.path.isdir(os.environ['HPCDDP_RUN_DIR'] + '/attempts')); sys.exit(3)"
    done = launch(tmp_path, "--here", "--scratch", "--ranks-per-node", "1", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (3, "True")
    assert os.listdir(tmp_path) == []
    (tmp_path / "runs/train").mkdir(parents=True)
    assert launch(tmp_path, "--here", "--scratch", "--ranks-per-node", "1", "--", "true").returncode == 0
    assert os.listdir(tmp_path / "runs") == ["train"]


def test_scratch_removes_no_run_that_was_there(tmp_path: Path) -> None:
    text = launch(tmp_path, "--here", "--scratch", "--dry-run", "--ranks-per-node", "1", "--", "true").stdout
    folder = re.search(r"runs/\.scratch-\S+", text)
    assert folder is not None
    (tmp_path / "runs/mine").mkdir(parents=True)
    script = tmp_path / "job.sh"
    script.write_text(text.replace(folder[0], "runs/mine"))
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "runs/mine is there already, and --scratch would remove it" in done.stderr
    assert os.listdir(tmp_path / "runs") == ["mine"]
