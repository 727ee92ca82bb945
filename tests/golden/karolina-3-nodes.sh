#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=OPEN-12-3
#SBATCH --partition=qgpu
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site karolina (https://docs.it4i.cz/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 8, ranks 24, CPUs per rank 16.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=16

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site karolina -- \
    srun --nodes=3 --ntasks=24 --ntasks-per-node=8 \
    --cpus-per-task=16 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 8 -- \
    python train.py
