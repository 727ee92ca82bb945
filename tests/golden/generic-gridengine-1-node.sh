#!/bin/bash
#$ -N train
#$ -cwd
#$ -pe mpi 32
#$ -l h_rt=01:20:05
#$ -j y
#$ -r n
#$ -S /bin/bash
# Made by hpcddp 1.2.3 for site generic-gridengine (https://arc.liv.ac.uk/trac/SGE):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 8.

cd "${SGE_O_WORKDIR:-.}" || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler gridengine --launcher openmpi --site generic-gridengine -- \
    "$launcher" -np 4 --map-by ppr:4:node --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
