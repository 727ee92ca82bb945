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

set -o pipefail # the job's status is the launcher's, also behind tee
cd "${SGE_O_WORKDIR:-.}" || exit

module load openmpi/5.0.2-gcc || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=48

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=${JOB_ID:?is not set: this is a Grid Engine job script}
if [ "${SGE_TASK_ID:-undefined}" != undefined ]; then HPCDDP_ATTEMPT+=-$SGE_TASK_ID; fi
if [ "${RESTARTED:-0}" != 0 ]; then HPCDDP_ATTEMPT+=-r$(date +%s); fi
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 8405))
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "tsubame4"
nodes: 1
walltime: "02:20:05"
account: "tga-abc"
command: ["python", "train.py"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "tsubame4", "scheduler": "gridengine", "launcher": "openmpi", "nodes": 1, "ranks_per_node": 4, "world_size": 4, "gpus_per_node": 4, "cpus_per_rank": 48, "threads_per_rank": 48, "walltime_s": 8405, "queue": "node_f", "account": "tga-abc", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

status=0
"$launcher" -np 4 \
    --map-by ppr:4:node --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py < /dev/null 2>&1 | tee -a "$attempt/logs/job.log" || status=$?

if [ "$status" -ne 0 ]; then
    echo "hpcddp: the launcher ended with status $status; the ranks' logs are in $attempt/logs" >&2
fi
exit "$status"
