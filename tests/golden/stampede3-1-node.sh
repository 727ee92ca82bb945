#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=h100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site stampede3 (https://docs.tacc.utexas.edu/hpc/stampede3/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 24.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
launcher=$(type -P ibrun) || launcher=ibrun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=24

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher ibrun --site stampede3 -- \
    env TACC_TASKS_PER_NODE=4 "$launcher" -n 4 -o 0 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
