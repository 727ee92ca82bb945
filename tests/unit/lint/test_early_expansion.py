"""A rank's variable that the batch shell expands: bash says which of these scripts do so, and lint says the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcddp.lint.rules import lint_script
from hpcddp.lint.script import read_script

HEADER = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4 --no-requeue\n"
RIGHT_RUN = "srun bash -c 'python t.py $SLURM_PROCID'\n"
# What the scripts find on PATH: an srun that starts rank 7, and a python that says what it got.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do
  if [[ $1 == --export=* ]]; then IFS=,; for word in ${1#--export=}; do [[ $word == *=* ]] && export "$word"; done; fi
  unset IFS; shift
done
export SLURM_PROCID=7 SLURM_STEP_ID=0
exec "$@"
"""
PYTHON = '#!/bin/bash\necho "got $* $RANK"\n'

EARLY = [
    "srun python t.py --rank $SLURM_PROCID\n",
    "srun python t.py ${SLURM_PROCID}\n",
    "srun python t.py ${SLURM_PROCID:-0}\n",
    "srun python t.py $((SLURM_PROCID * 1))\n",
    "srun python t.py `echo $SLURM_PROCID`\n",
    "srun python t.py $(echo $SLURM_PROCID)\n",
    "srun python t.py $(printenv SLURM_PROCID)\n",
    "srun --export=ALL,RANK=$SLURM_PROCID python t.py\n",
    'srun bash -c "python t.py $SLURM_PROCID"\n',
    'srun sh -c "export RANK=$SLURM_PROCID; python t.py"\n',
    'srun bash -c "python t.py `echo $SLURM_PROCID`"\n',
    "srun bash -c 'python t.py '$SLURM_PROCID\n",
    "srun bash <<EOF\npython t.py $SLURM_PROCID\nEOF\n",
    "cat > run.sh <<EOF\npython t.py $SLURM_PROCID\nEOF\nsrun bash run.sh\n",
    "cat <<EOF | srun bash\npython t.py $(echo $SLURM_PROCID)\nEOF\n",
    'echo "python t.py $SLURM_PROCID" > run.sh\nsrun bash run.sh\n',
    "export RANK=$SLURM_PROCID\nsrun python t.py\n",
    "RANK=$SLURM_PROCID\nexport RANK\nsrun python t.py\n",
    "read -r RANK <<< $SLURM_PROCID\nexport RANK\nsrun python t.py\n",
    ': "${RANK:=$SLURM_PROCID}"\nexport RANK\nsrun python t.py\n',
    "set -a; RANK=$SLURM_PROCID; set +a; srun python t.py\n",
    'ARGS=(--rank $SLURM_PROCID)\nsrun python t.py "${ARGS[@]}"\n',
    'ARGS=(bash -c "python t.py $SLURM_PROCID")\nsrun "${ARGS[@]}"\n',
    'declare -a ARGS=($(echo $SLURM_PROCID))\nsrun python t.py "${ARGS[@]}"\n',
    'CMD="python t.py $SLURM_PROCID"\nsrun bash -c "$CMD"\n',
    "eval 'srun python t.py $SLURM_PROCID'\n",
    "bash -c 'srun python t.py $SLURM_PROCID'\n",
    "function run {\n  srun python t.py $1\n}\nrun $SLURM_PROCID\n",
    "(export RANK=$SLURM_PROCID; srun python t.py)\n",
    "{ RANK=$SLURM_PROCID; export RANK; }\nsrun python t.py\n",
    "srun python t.py $SLURM_PROCID &\nwait\n",
    "echo 'python t.py RANK' > run.in\nsed \"s/RANK/$SLURM_PROCID/\" run.in > run.sh\nsrun bash run.sh\n",
]  # fmt: skip
RIGHT = [
    RIGHT_RUN,
    "srun bash -c 'RANK=$SLURM_PROCID python t.py'\n",
    'srun bash -c "python t.py \\$SLURM_PROCID"\n',
    "srun bash -c $'python t.py $SLURM_PROCID'\n",
    "srun bash -c \"bash -c 'python t.py \\$SLURM_PROCID'\"\n",
    'srun bash <<"EOF"\npython t.py $SLURM_PROCID\nEOF\n',
    "srun bash <<EOF\npython t.py \\$SLURM_PROCID\nEOF\n",
    "cat > run.sh <<'EOF'\npython t.py $SLURM_PROCID\nEOF\nsrun bash run.sh\n",
    "echo 'python t.py $SLURM_PROCID' > run.sh\nsrun bash run.sh\n",
    "ARGS=(bash -c 'python t.py $SLURM_PROCID')\nsrun \"${ARGS[@]}\"\n",
    "run() { python t.py $SLURM_PROCID; }\nexport -f run\nsrun bash -c run\n",
    "run() { python t.py $SLURM_PROCID; }\nsrun bash -c \"$(declare -f run); run\"\n",
    f'echo "batch shell of rank $SLURM_PROCID on node $SLURM_NODEID"\n{RIGHT_RUN}',
    f"cat <<EOF\nnode $SLURM_NODEID\nEOF\n{RIGHT_RUN}",
    f'if [ "$SLURM_PROCID" -eq 0 ]; then mkdir -p out; fi\n{RIGHT_RUN}',
    f"unused() {{ export RANK=$SLURM_PROCID; }}\n{RIGHT_RUN}",
    'if [ -z "$SLURM_STEP_ID" ]; then exec srun bash "$0"; fi\npython t.py $SLURM_PROCID\n',
]  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, text in {"srun": SRUN, "python": PYTHON}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def rank_got(text: str, programs: Path, folder: Path) -> bool:
    """Whether the program that bash starts in rank 7 is told that it is rank 7."""
    (folder / "job.sh").write_text(text)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    done = subprocess.run(["bash", "--norc", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stdout.splitlines() if line.startswith("got ")]
    assert len(said) == 1, done
    return "7" in said[0]


def blamed(text: str) -> bool:
    return "A26" in {f.rule for f in lint_script("job.sh", read_script(text, None, lambda _: True))}


@pytest.mark.parametrize("body", EARLY)
def test_a_rank_variable_that_the_batch_shell_expands_is_found(body, programs, tmp_path):
    assert not rank_got(HEADER + body, programs, tmp_path)
    assert blamed(HEADER + body)


@pytest.mark.parametrize("body", RIGHT)
def test_a_rank_variable_that_each_rank_expands_is_not_blamed(body, programs, tmp_path):
    assert rank_got(HEADER + body, programs, tmp_path)
    assert not blamed(HEADER + body)


@pytest.mark.parametrize(
    "variable",
    ["SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK",
     "PMIX_RANK", "MPI_LOCALRANKID", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "PBS_TASKNUM"],
)  # fmt: skip
def test_every_launchers_variables_are_known(variable):
    pbs = "#!/bin/bash\n#PBS -N x -r n -l select=2:ncpus=4:mpiprocs=4:ompthreads=1 -l place=scatter\n"
    assert blamed(f"{HEADER}srun python t.py ${variable}\n")
    assert blamed(f"{pbs}mpirun -np 8 -x RANK=${variable} python t.py\n")
    assert not blamed(f"{pbs}mpirun -np 8 bash -c 'python t.py ${variable}'\n")


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\nexport RANK=$SLURM_PROCID\nexec python train.py\n",  # what srun starts in each rank
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1\ntorchrun --node_rank $SLURM_NODEID --nproc_per_node 4 train.py\n",
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1\nsrun torchrun --node_rank $SLURM_PROCID train.py\n",
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=4\nsrun python train.py --node $SLURM_NODEID\n",  # it is 0
        "#!/bin/bash\n#SBATCH --ntasks=1 --array=0-3\nsrun python train.py --fold $SLURM_ARRAY_TASK_ID\n",
    ],
)
def test_what_is_right_on_one_node_or_in_each_rank_is_not_blamed(text):
    assert not blamed(text)
