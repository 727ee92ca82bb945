#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc@v100
#SBATCH --qos=qos_gpu-t3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:2
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --hint=nomultithread
# Made by hpcddp 1.2.3 for site jean-zay (http://www.idris.fr/eng/jean-zay/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 10.

cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset SLURM_EXPORT_ENV # of sbatch --export=NONE, which is not meant for the ranks

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=10

export HPCDDP_PYTHON HPCDDP_RUN_DIR="$PWD"/runs/train

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" '{"request": "site: \"jean-zay\"\nnodes: 1\ngpus_per_node: 2\nwalltime: \"02:20:05\"\naccount: \"abc@v100\"\ncommand: [\"python\", \"train.py\"]\n", "plan": {"schema": 1, "name": "train", "site": "jean-zay", "scheduler": "slurm", "launcher": "srun", "nodes": 1, "ranks_per_node": 2, "world_size": 2, "gpus_per_node": 2, "cpus_per_rank": 10, "threads_per_rank": 10, "walltime_s": 8405, "queue": "qos_gpu-t3", "account": "abc@v100", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}, "makes_ranks": "srun", "walltime_s": 8405}' -- \
    srun --nodes=1 --ntasks=2 --ntasks-per-node=2 \
    --cpus-per-task=10 --kill-on-bad-exit=1 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
