#!/bin/bash
#$ -N train
#$ -cwd
#$ -l node_f=1
#$ -l h_rt=02:20:05
#$ -j y
#$ -r n
# Made by hpcddp 1.2.3 for site tsubame4 (https://www.t4.gsic.titech.ac.jp/en/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 48.

cd "${SGE_O_WORKDIR:-.}" || exit

module load openmpi/5.0.2-gcc || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=48

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"tsubame4\"\nnodes: 1\nwalltime: \"02:20:05\"\naccount: \"tga-abc\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "tsubame4", "scheduler": "gridengine", "launcher": "openmpi", "nodes": 1, "ranks_per_node": 4, "world_size": 4, "gpus_per_node": 4, "cpus_per_rank": 48, "threads_per_rank": 48, "walltime_s": 8405, "queue": "node_f", "account": "tga-abc", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "openmpi", "walltime_s": 8405, "follow_options": ["-g", "tga-abc"]}' -- \
    "$launcher" -np 4 --map-by ppr:4:node --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
