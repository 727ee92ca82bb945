#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=project_2001234
#SBATCH --partition=gpumedium
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=72
#SBATCH --gres=gpu:gh200:2
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site roihu (https://docs.csc.fi/computing/systems-roihu/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 72.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

module load python-pytorch/2.10 || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=72

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site roihu -- \
    srun --nodes=1 --ntasks=2 --ntasks-per-node=2 \
    --cpus-per-task=72 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
