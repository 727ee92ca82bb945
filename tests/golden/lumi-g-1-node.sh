#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=project_465000000
#SBATCH --partition=standard-g
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site lumi-g (https://docs.lumi-supercomputer.eu/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 8, ranks 8, CPUs per rank 7.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

module use /appl/local/laifs/modules || exit
module load lumi-aif-singularity-bindings || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=7
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export NCCL_NET_GDR_LEVEL=PHB

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site lumi-g -- \
    srun --nodes=1 --ntasks=8 --ntasks-per-node=8 \
    --cpus-per-task=7 --kill-on-bad-exit=1 \
    --cpu-bind=mask_cpu=0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 8 -- \
    python train.py
