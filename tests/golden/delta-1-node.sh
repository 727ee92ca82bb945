#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abcd-gpu
#SBATCH --partition=gpuA100x4
#SBATCH --constraint=scratch
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --mem=240G
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --gpu-bind=closest
# Made by hpcddp 1.2.3 for site delta (https://docs.ncsa.illinois.edu/systems/delta/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 16.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=16

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site delta -- \
    srun --nodes=1 --ntasks=4 --ntasks-per-node=4 \
    --cpus-per-task=16 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
