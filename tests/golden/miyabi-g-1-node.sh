#!/bin/bash
#PBS -N train
#PBS -W group_list=abc123
#PBS -q regular-g
#PBS -l select=1:mpiprocs=1:ompthreads=72
#PBS -l walltime=02:20:05
#PBS -j oe
#PBS -r n
# Made by hpcddp 1.2.3 for site miyabi-g (https://www.cc.u-tokyo.ac.jp/en/supercomputer/miyabi/service/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 1, ranks 1, CPUs per rank 72.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

unset OMPI_MCA_mca_base_env_list || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=72
export NCCL_SOCKET_IFNAME=ibP2s2

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site miyabi-g -- \
    "$launcher" -np 1 --map-by ppr:1:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x NCCL_SOCKET_IFNAME -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 1 -- \
    python train.py
