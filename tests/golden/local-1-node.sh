#!/bin/bash
# Made by hpcddp 1.2.3 for site local (https://docs.open-mpi.org/en/main/launching-apps/quickstart.html):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 1.


set -e # from here on a line that fails ends the job
launcher=mpirun
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=1

if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler local --launcher openmpi --site local -- \
    "$launcher" -np 4 --map-by slot:OVERSUBSCRIBE --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py
