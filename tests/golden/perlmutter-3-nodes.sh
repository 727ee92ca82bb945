#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --image=nersc/pytorch:24.08.01
#SBATCH --module=gpu,nccl-plugin
# Made by hpcddp 1.2.3 for site perlmutter (https://docs.nersc.gov/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 32.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

module load pytorch/2.6.0 || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=$(type -P python3) # the modules'
export OMP_NUM_THREADS=16
export FI_MR_CACHE_MONITOR=userfaultfd
export HDF5_USE_FILE_LOCKING=FALSE
export CUDA_VISIBLE_DEVICES=3,2,1,0 # a rank's GPU is the one next to its CPUs

export HPCDDP_PYTHON
runs="$PWD"/runs && mkdir -p "$runs" # the container sees it

exec /opt/env/bin/python -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site perlmutter -- \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=32 --kill-on-bad-exit=1 \
    --cpu-bind=cores \
    -u \
    shifter \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
