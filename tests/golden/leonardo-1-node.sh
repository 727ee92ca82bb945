#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=boost_usr_prod
#SBATCH --qos=boost_qos_dbg
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:2
#SBATCH --time=00:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site leonardo (https://docs.hpc.cineca.it/hpc/leonardo.html):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 8.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"leonardo\"\nnodes: 1\ngpus_per_node: 2\nwalltime: \"00:20:05\"\nqueue: \"boost_qos_dbg\"\naccount: \"abc123\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "leonardo", "scheduler": "slurm", "launcher": "srun", "nodes": 1, "ranks_per_node": 2, "world_size": 2, "gpus_per_node": 2, "cpus_per_rank": 8, "threads_per_rank": 8, "walltime_s": 1205, "queue": "boost_qos_dbg", "account": "abc123", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "srun", "walltime_s": 1205}' -- \
    srun --nodes=1 --ntasks=2 --ntasks-per-node=2 \
    --cpus-per-task=8 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
