#!/bin/bash
#PBS -N train
#PBS -A abc123
#PBS -q main
#PBS -l select=1:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB:ompthreads=16
#PBS -l place=scatter
#PBS -l walltime=07:20:05
#PBS -j oe
#PBS -r n
#PBS -k eod
# Made by hpcddp 1.2.3 for site derecho (https://ncar-hpc-docs.readthedocs.io/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 16.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module --force purge || exit
module load ncarenv/24.12 || exit
module load nvhpc || exit
module load cuda/12.3.2 || exit
module load cray-mpich || exit
module load conda || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=16
export NCCL_SOCKET_IFNAME=hsn
export NCCL_IB_DISABLE=1
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_MR_CACHE_MONITOR=userfaultfd

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher pals --site derecho -- \
    "$launcher" -n 4 --ppn 4 --depth 16 --cpu-bind none \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
