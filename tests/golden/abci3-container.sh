#!/bin/bash
#PBS -N train
#PBS -P gabc12345
#PBS -q rt_HF
#PBS -l select=3:mpiprocs=8:ompthreads=12
#PBS -l walltime=100:20:05
#PBS -j oe
#PBS -r n
#PBS -k oe
#PBS -v USE_SSH=1,BEEOND_ON=1
# Made by hpcddp 1.2.3 for site abci3 (https://docs.abci.ai/v3/en/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 8, ranks 24, CPUs per rank 24.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

source /etc/profile.d/modules.sh
module load cuda/12.6/12.6.1 || exit
module load cudnn/9.5/9.5.1 || exit
module load hpcx/2.20 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/usr/bin/python3
export APPTAINERENV_PREPEND_PATH="${HPCDDP_PYTHON%/*}" SINGULARITYENV_PREPEND_PATH="${HPCDDP_PYTHON%/*}" OMP_NUM_THREADS=12

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR
runs="$PWD"/runs && mkdir -p "$runs" # the container sees it

exec /opt/env/bin/python -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site abci3 -- \
    "$launcher" -np 24 --map-by ppr:8:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR -x APPTAINERENV_PREPEND_PATH -x SINGULARITYENV_PREPEND_PATH \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} ${UCX_NET_DEVICES:+-x UCX_NET_DEVICES} ${UCX_MAX_RNDV_RAILS:+-x UCX_MAX_RNDV_RAILS} ${UCX_MAX_EAGER_RAILS:+-x UCX_MAX_EAGER_RAILS} \
    singularity exec --nv --pwd "$PWD" --bind "$PWD" --bind "$runs" \
    'torch 2.sif' \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 8 -- \
    python train.py
