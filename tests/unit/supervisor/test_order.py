"""The words of a job script say what the job is: `hpcddp supervise` reads them, and refuses what it does not know."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS
from hpcddp.supervisor.follow import find_walltime
from hpcddp.supervisor.order import find_run_folder, take_index
from tests.job_script import order_of

EXEC = "python -m hpcddp exec"


def words(options: str = "", line: str = f"srun {EXEC} -- python train.py", launcher: str = "srun") -> list[str]:
    options += "" if "--name" in options else " --name train"
    return shlex.split(f"--scheduler slurm --launcher {launcher} {options} -- {line}")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ("--chain x", "--chain 'x' is not a whole number of 1 or more", "--chain 4"),
        ("--chain 0", "--chain '0' is not a whole number of 1 or more", "--chain"),
        ("--max-restarts two", "--max-restarts 'two'", "--max-restarts"),
        ("--max-restart 2", "hpcddp supervise has no option --max-restart (did you mean '--max-restarts'?)", "--help"),
        ("--signal 5", "--signal '5' is not a duration", "write it as"),
        ("--walltime later", "--walltime 'later' is not a duration", "write it as"),
        ("--fewer-nodes 4-2", "--fewer-nodes: nodes is not a list of values", "nodes: 1-3"),
        ("--fewer-nodes two", "--fewer-nodes 'two'", "--fewer-nodes 4"),
        ("--sweep lr", "--sweep 'lr' is no further value of a name", "--sweep lr=0.1"),
        ("--sweep lr=1 --sweep lr=1", "--sweep 'lr=1' is no further value of a name", "--sweep lr=0.1"),
        ("--sweep lr=1 --sweep lr=2", "{lr} does not stand in the command", "{lr}"),
        ("--name=../x", "--name '../x' is not one word", "--name _x"),
        ("--name=x.old1", "--name 'x.old1' ends in .old1", "--name x_old1"),
        ("train.py", "no -- before the command", "--"),
    ],
)
def test_a_wrong_word_is_named_before_anything_starts(options: str, message: str, hint: str):
    with pytest.raises(RequestError) as caught:
        order_of(words(options))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_the_run_is_the_name_of_the_words_below_runs_or_their_folder_and_is_made_of_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    link = {"PWD": str(tmp_path / "link")}  # what other hosts may know alone
    here = {"PWD": "/elsewhere"}
    for options, env, folder in (
        ("--name s", link, tmp_path / "link/runs/s"),
        ("--name s.7", here, tmp_path / "real/runs/s.7"),  # a point of a sweep that is several jobs
        ("--run-dir a/s", {}, tmp_path / "real/a/s"),
        ("--run-dir /a/s", link, Path("/a/s")),
    ):
        line = ["--scheduler", "slurm", "--launcher", "srun", "--", *f"srun {EXEC} -- python t.py --lr 7".split()]
        assert find_run_folder(order_of([*options.split(), *line]), env) == str(folder)
    with pytest.raises(RequestError, match="name no run\nhint: --name t-lr7"):
        order_of(line)


@pytest.mark.parametrize(
    ("launcher", "line"),
    [("mpirum", f"mpirum {EXEC} -- true"), ("srun", "srun -n 2 python train.py"), ("srun", f"srun {EXEC} --")],
)
def test_a_line_that_starts_no_ranks_is_refused(launcher: str, line: str):
    with pytest.raises(RequestError):
        order_of(words(launcher=launcher, line=line))


@pytest.mark.parametrize(
    ("launcher", "line", "numbers"),
    [
        ("srun", "srun --nodes=2 --ntasks=8 --ntasks-per-node=4", (2, 4, 8)),
        ("srun", "srun -N 2 -n8", (2, 4, 8)),
        ("srun", "srun --label apptainer exec -n 5 image", (3, None, None)),
        ("openmpi", "mpirun --mca btl ^openib -np 8 --map-by ppr:4:node:PE=2 -x A=-np", (2, 4, 8)),
        ("openmpi", "/a/mpirun -np 6 --map-by slot:OVERSUBSCRIBE", (3, 2, 6)),
        ("mpich", "mpiexec -n 8 -ppn 4 -f -hosts", (2, 4, 8)),
        ("pals", "mpiexec -n 8 --ppn 4 --depth 16", (2, 4, 8)),
        ("ibrun", "env TACC_TASKS_PER_NODE=4 ibrun -n 8 -o 0", (2, 4, 8)),
        ("srun", "srun --nodes=2 --ntasks=2 python -m torch.distributed.run --nproc-per-node=4 --nnodes=2", (2, 4, 8)),
        ("torchrun", "python -m torch.distributed.run --nproc-per-node=4 --nnodes=1 --standalone", (1, 4, 4)),
    ],
)
def test_the_launcher_s_words_say_how_many_there_are_else_the_job_s_hosts(
    launcher: str, line: str, numbers: tuple[int | None, ...]
):
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    found = order_of(words(launcher=launcher, line=f"{line} {EXEC} -- sh -c '-n 3'"), env).line
    assert (found.nodes, found.ranks_per_node, found.world_size) == numbers
    assert found.command == ("sh", "-c", "-n 3")


def test_a_sweep_s_values_are_filled_into_the_command_of_the_line():
    options = "--sweep lr=0.1 --sweep lr=a,b --sweep seed=--x --sweep seed=2"
    order = order_of(words(options, line=f"srun {EXEC} -- t.py {{lr}} {{seed}}"))
    told = list[str]()
    taken = take_index(order, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "7"}, told.append)
    assert taken.line.command == ("t.py", "a,b", "--x")
    assert (dict(taken.point), told) == ({"lr": "a,b", "seed": "--x"}, ["point 3 of 4: lr=a,b seed=--x"])
    with pytest.raises(HpcddpError, match="index 5 is no point of this sweep, which has 4"):
        take_index(order, {"SLURM_ARRAY_TASK_ID": "5", "SLURM_JOB_ID": "7"}, told.append)


@pytest.mark.parametrize(
    ("scheduler", "directive", "seconds"),
    [
        ("pbs", "#PBS -l select=2:ncpus=4,walltime=02:00:00", 7200),
        ("pbs", "#PBS -l walltime=soon", None),
        ("slurm", "#SBATCH --time=1-0:0:0", 86400),
        ("slurm", "#SBATCH -t 00:10:00", 600),
        ("gridengine", "#$ -l h_rt=00:00:30", 30),
        ("local", "#PBS -l walltime=02:00:00", None),
    ],
)
def test_a_scheduler_that_is_silent_gave_the_walltime_of_the_directives(
    scheduler: str, directive: str, seconds: int | None, tmp_path: Path
):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{directive}\necho '{directive.replace('0', '5')}'\n")
    assert find_walltime(scheduler, str(script)) == seconds
    assert find_walltime(scheduler, "") is None
    assert find_walltime(scheduler, str(tmp_path / "none")) is None


def test_every_launcher_of_job_files_says_how_many_there_are():
    assert all(LAUNCHERS[name].counts for name in JOB_LAUNCHERS)


LONG = ["x" * 100_000, "y" * 100_000, *map(str, range(2000)), "it's $(false)\n"]
_SAYS = "import json, sys; open('said.json', 'w').write(json.dumps(sys.argv[1:]))"


@pytest.mark.multirank
def test_a_long_command_runs_and_is_recorded_whole(tmp_path: Path):
    size = ("--site", "local", "--launcher", "torchrun", "--ranks-per-node", "1", "--name", "long")
    argv = [sys.executable, "-m", "hpcddp", "render", *size, "--", "python", "-c", _SAYS, *LONG]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    script = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "said.json").read_text()) == LONG
    plan = json.loads((tmp_path / "runs/long/plan.json").read_text())
    assert plan["command"] == ["python", "-c", _SAYS, *LONG]
    (attempt,) = (tmp_path / "runs/long/attempts").iterdir()
    assert not (attempt / "script.sh").exists()  # bash's standard input is no file
