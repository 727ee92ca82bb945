#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=booster
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site juwels-booster (https://apps.fz-juelich.de/jsc/hps/juwels/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 8.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"juwels-booster\"\nnodes: 1\ncpus_per_rank: 8\nwalltime: \"02:20:05\"\naccount: \"abc123\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "juwels-booster", "scheduler": "slurm", "launcher": "srun", "nodes": 1, "ranks_per_node": 4, "world_size": 4, "gpus_per_node": 4, "cpus_per_rank": 8, "threads_per_rank": 8, "walltime_s": 8405, "queue": "booster", "account": "abc123", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "srun", "walltime_s": 8405}' -- \
    srun --nodes=1 --ntasks=4 --ntasks-per-node=4 \
    --cpus-per-task=8 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
