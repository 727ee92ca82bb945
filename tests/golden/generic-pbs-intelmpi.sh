#!/bin/bash
#PBS -N train
#PBS -l select=3:ncpus=32:mpiprocs=4:ngpus=2:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=01:20:05
#PBS -j oe
#PBS -r n
#PBS -W umask=022
# Made by hpcddp 1.2.3 for site generic-pbs (https://github.com/openpbs/openpbs):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module load intel-mpi/2021.13 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec.hydra) || launcher=mpiexec.hydra # the site's goes before the environment's
HPCDDP_PYTHON='/home/alice/my env/bin/python'
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

export I_MPI_PIN=off I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=off
read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher intelmpi --site generic-pbs -- \
    "$launcher" -n 12 -ppn 4 -machinefile "$PBS_NODEFILE" \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
