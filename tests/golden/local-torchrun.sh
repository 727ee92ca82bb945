#!/bin/bash
# Made by hpcddp 1.2.3 for site local (https://docs.open-mpi.org/en/main/launching-apps/quickstart.html):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 3.


set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=3

export HPCDDP_PYTHON

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler local --launcher torchrun --site local -- \
    "$HPCDDP_PYTHON" -m torch.distributed.run --no-python --nproc-per-node=2 --nnodes=1 \
    --standalone \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py
