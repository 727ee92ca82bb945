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

export HPCDDP_PYTHON
export HPCDDP_STAGED=/scratch/local # below it each attempt has a folder, copied to once on each node

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site generic-slurm -- \
    srun --nodes=3 --ntasks=3 --ntasks-per-node=1 \
    --cpus-per-task=32 --kill-on-bad-exit=1 \
    bash -c 'mkdir -p "$HPCDDP_STAGED" && cp -rL -- "$@" "$HPCDDP_STAGED"' stage data/train.tar --then \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=8 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
