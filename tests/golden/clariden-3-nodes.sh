#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=normal
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site clariden (https://docs.cscs.ch/clusters/clariden/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 72.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=72
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_PROTO='^LL128'
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=16384
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software
export FI_MR_CACHE_MONITOR=userfaultfd
export MPICH_GPU_SUPPORT_ENABLED=0
export CUDA_CACHE_DISABLE=1

export HPCDDP_PYTHON
export HPCDDP_STAGED=/dev/shm # below it each attempt has a folder, copied to once on each node

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site clariden -- \
    srun --nodes=3 --ntasks=3 --ntasks-per-node=1 \
    --cpus-per-task=288 --kill-on-bad-exit=1 \
    -u \
    bash -c 'mkdir -p "$HPCDDP_STAGED" && cp -rL -- "$@" "$HPCDDP_STAGED"' stage data/train.tar --then \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=72 --kill-on-bad-exit=1 \
    -u \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
