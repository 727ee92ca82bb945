#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=workq
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --gpus=12
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site isambard-ai (https://docs.isambard.ac.uk/user-documentation/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 72.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

module load brics/nccl || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=72
export NCCL_NET='AWS Libfabric'
export NCCL_SOCKET_IFNAME=hsn
export FI_CXI_RDZV_PROTO=alt_read

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site isambard-ai -- \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=72 --kill-on-bad-exit=1 \
    --mpi=pmi2 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
