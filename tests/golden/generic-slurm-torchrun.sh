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
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

read -r MASTER_ADDR < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?is not set: this is a Slurm job script}")
export HPCDDP_PYTHON MASTER_ADDR
job_number=$SLURM_JOB_ID
launch_number=$(cksum <<< "$job_number $$") launch_number=${launch_number%% *} # a job may start several
rendezvous=$MASTER_ADDR:$((12000 + launch_number % 20000)) # below the ports that Linux hands out

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site generic-slurm -- \
    srun --nodes=3 --ntasks=3 --ntasks-per-node=1 \
    --cpus-per-task=32 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m torch.distributed.run --no-python --nproc-per-node=4 --nnodes=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$rendezvous" --rdzv-id="$launch_number" \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
