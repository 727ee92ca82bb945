#!/bin/bash
#PBS -N train
#PBS -l select=3:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=01:20:05
#PBS -j oe
#PBS -r n
# Made by hpcddp 1.2.3 for site generic-pbs (https://github.com/openpbs/openpbs):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher mpich --site generic-pbs -- \
    "$launcher" -n 12 -ppn 4 -f "$PBS_NODEFILE" \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py
