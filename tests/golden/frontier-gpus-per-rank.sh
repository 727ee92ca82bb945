#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=batch
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=14
#SBATCH --time=01:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --network=disable_rdzv_get
# Made by hpcddp 1.2.3 for site frontier (https://docs.olcf.ornl.gov/systems/frontier_user_guide.html):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 14.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

module load PrgEnv-gnu/8.7.0 || exit
module load cpe/26.03 || exit
module load miniforge3/23.11.0-0 || exit
module load rocm/7.1.1 || exit
module load rccl-net-plugin || exit
module load craype-accel-amd-gfx90a || exit
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH" || exit
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen" MIOPEN_CUSTOM_CACHE_DIR="/tmp/$USER-miopen" || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=14
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export http_proxy=http://proxy.ccs.ornl.gov:3128/
export https_proxy=http://proxy.ccs.ornl.gov:3128/
export no_proxy='localhost,127.0.0.0/8,*.ccs.ornl.gov'
export HPCDDP_GPUS_PER_RANK=2

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site frontier -- \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=14 --kill-on-bad-exit=1 \
    --gpus-per-task=2 --gpu-bind=closest \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 8 -- \
    python train.py
