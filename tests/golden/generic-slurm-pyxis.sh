#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --time=01:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site generic-slurm (https://slurm.schedmd.com/sbatch.html):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/usr/bin/python3
export OMP_NUM_THREADS=8

export HPCDDP_PYTHON
runs="$PWD"/runs && mkdir -p "$runs" # the container sees it

exec /opt/env/bin/python -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site generic-slurm -- \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=8 --kill-on-bad-exit=1 \
    --container-image='nvcr.io#nvidia/pytorch:25.01-py3' --container-workdir="$PWD" \
    --container-mounts="$PWD:$PWD,$runs:$runs",/data:/data,/scratch:/mnt \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
