#!/bin/bash
#PBS -N train
#PBS -l select=3:ncpus=32:mpiprocs=4:ngpus=2:mem=60GB:ompthreads=8:gpu_type=A100
#PBS -l place=scatter:excl
#PBS -l walltime=01:20:05
#PBS -j oe
#PBS -o job.log
#PBS -r y
#PBS -J 0-8%5
#PBS -W depend=afterok:1234.pbs1,afterany:77
#PBS -h
#PBS -m ea
#PBS -M alice@example.org
# Made by hpcddp 1.2.3 for site generic-pbs (https://github.com/openpbs/openpbs):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON="$PWD"/proj/.venv/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR
export HPCDDP_STAGED=/local # below it each attempt has a folder, copied to once on each node

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site generic-pbs \
    --signal 00:02:07 -- \
    "$launcher" -np 3 --map-by ppr:1:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR -x HPCDDP_STAGED \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    bash -c 'mkdir -p "$HPCDDP_STAGED" && cp -rL -- "$@" "$HPCDDP_STAGED"' stage data/train.tar --then \
    "$launcher" -np 12 --map-by ppr:4:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR -x HPCDDP_STAGED \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
