#!/bin/bash
#PBS -N train
#PBS -P gabc12345
#PBS -q rt_HF
#PBS -l select=3:mpiprocs=4:ompthreads=8
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -r n
#PBS -k oe
# Made by hpcddp 1.2.3 for site abci3 (https://docs.abci.ai/v3/en/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 16.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

source /etc/profile.d/modules.sh
module load cuda/12.6/12.6.1 || exit
module load cudnn/9.5/9.5.1 || exit
module load hpcx/2.20 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site abci3 -- \
    "$launcher" -np 12 --map-by ppr:4:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} ${UCX_NET_DEVICES:+-x UCX_NET_DEVICES} ${UCX_MAX_RNDV_RAILS:+-x UCX_MAX_RNDV_RAILS} ${UCX_MAX_EAGER_RAILS:+-x UCX_MAX_EAGER_RAILS} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 8 -- \
    python train.py
