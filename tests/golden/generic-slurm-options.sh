#!/bin/bash
#SBATCH --job-name=train
#SBATCH --constraint=a100&nvlink
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --mem=60G
#SBATCH --exclusive
#SBATCH --time=01:20:05
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --array=1-9:2%5
#SBATCH --hold
#SBATCH --signal=USR1@127
#SBATCH --mail-type=BEGIN,END,FAIL
#SBATCH --mail-user=alice@example.org
# Made by hpcddp 1.2.3 for site generic-slurm (https://slurm.schedmd.com/sbatch.html):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train
export HPCDDP_STAGED=/scratch/local # below it each attempt has a folder, copied to once on each node

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"generic-slurm\"\nnodes: 3\nranks_per_node: 4\ngpus_per_node: 2\ncpus_per_rank: 8\nmem_gb: 60\nwalltime: \"01:20:05\"\nstage_in: [\"data/train.tar\"]\nstage_dir: \"/scratch/local\"\nconstraint: \"a100&nvlink\"\nexclusive: true\noutput: \"%x-%A-%a.log\"\nmail: [\"begin\", \"end\", \"fail\"]\nmail_to: \"alice@example.org\"\narray: \"1-9:2\"\narray_limit: 5\nhold: true\nrequeue: true\nsignal: \"00:02:07\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "generic-slurm", "scheduler": "slurm", "launcher": "srun", "nodes": 3, "ranks_per_node": 4, "world_size": 12, "gpus_per_node": 2, "cpus_per_rank": 8, "threads_per_rank": 8, "walltime_s": 4805, "queue": null, "account": null, "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "srun", "walltime_s": 4805, "stages": true}' -- \
    srun --nodes=3 --ntasks=3 --ntasks-per-node=1 \
    --cpus-per-task=32 --kill-on-bad-exit=1 \
    bash -c 'mkdir -p "$HPCDDP_STAGED" && cp -rL -- "$@" "$HPCDDP_STAGED"' stage data/train.tar --then \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=8 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
