#!/bin/bash
#SBATCH --job-name=train
#SBATCH --reservation=maintenance-7
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --time=01:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --dependency=afterok:1234,afterany:77
# Made by hpcddp 1.2.3 for site generic-slurm (https://slurm.schedmd.com/sbatch.html):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
eval "$(conda shell.bash hook)"
conda activate 'torch 2'
HPCDDP_PYTHON=$CONDA_PREFIX/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler slurm --launcher openmpi --site generic-slurm \
    --signal 00:02:07 -- \
    "$launcher" -np 12 --map-by ppr:4:node --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
