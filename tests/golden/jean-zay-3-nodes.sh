#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc@v100
#SBATCH --qos=qos_gpu-t3
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:4
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --hint=nomultithread
# Made by hpcddp 1.2.3 for site jean-zay (http://www.idris.fr/eng/jean-zay/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 10.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=10

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher srun --site jean-zay -- \
    srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=10 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
