#!/bin/bash
# Made by hpcddp 1.2.3 for site local (https://docs.open-mpi.org/en/main/launching-apps/quickstart.html):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 3.


set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=3

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"local\"\nranks_per_node: 2\nlauncher: \"torchrun\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "local", "scheduler": "local", "launcher": "torchrun", "nodes": 1, "ranks_per_node": 2, "world_size": 2, "gpus_per_node": 0, "cpus_per_rank": 3, "threads_per_rank": 3, "walltime_s": 604800, "queue": "here", "account": null, "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "torchrun"}' -- \
    "$HPCDDP_PYTHON" -m torch.distributed.run --no-python --nproc-per-node=2 --nnodes=1 \
    --standalone \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py
