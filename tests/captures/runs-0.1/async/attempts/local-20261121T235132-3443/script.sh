#!/bin/bash
# Made by hpcddp 0.1.0 for site local (https://docs.open-mpi.org/en/main/launching-apps/quickstart.html):
#   hpcddp render --site local --nodes 1 --ranks-per-node 2 --name async --global-batch 8 --set walltime=0:10:00 -- python train.py async
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 1.


set -e # from here on a line that fails ends the job
launcher=mpirun
HPCDDP_PYTHON=/home/user/hpcddp/.venv/bin/python3
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export PYTHONPATH=/home/user/hpcddp"${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1

HPCDDP_RUN_DIR="$PWD"/runs/async
HPCDDP_ATTEMPT=local-$(date +%Y%m%dT%H%M%S)-$$
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 600))
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "local"
name: "async"
nodes: 1
ranks_per_node: 2
walltime: "00:10:00"
global_batch: 8
command: ["python", "train.py", "async"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "async", "site": "local", "scheduler": "local", "launcher": "openmpi", "nodes": 1, "ranks_per_node": 2, "world_size": 2, "gpus_per_node": 0, "cpus_per_rank": 1, "threads_per_rank": 1, "walltime_s": 600, "queue": "here", "account": null, "global_batch": 8, "command": ["python", "train.py", "async"], "run_dir": "runs/async", "created_by": "hpcddp render --site local --nodes 1 --ranks-per-node 2 --name async --global-batch 8 --set walltime=0:10:00 -- python train.py async"}
HPCDDP_PLAN

state() { # how far the run is, by the state.json that its ranks write
    "$HPCDDP_PYTHON" -m hpcddp state "$@" < /dev/null
}

# What signals come here go on as SIGUSR1: openmpi lives on, and gives it to all ranks, which save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -np 2 \
    --map-by slot:OVERSUBSCRIBE --bind-to none \
    -x PATH -x PYTHONPATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py async < /dev/null >&3 2>&1 3>&- &
launched=$!
exec 3>&-
while :; do # a signal ends the wait, not the launcher
    came=
    status=0
    wait "$launched" || status=$?
    if [ -z "$came" ]; then break; fi
    echo "hpcddp: SIG$(kill -l "$status") came and went on as SIGUSR1" >&2
done
trap '' TERM USR1 USR2 INT # a few lines are left
wait "$tee" 2> /dev/null || true

if [ "$status" -ne 0 ]; then
    echo "hpcddp: the launcher ended with status $status; the ranks' logs are in $attempt/logs" >&2
fi
if [ "$status" -eq 0 ] && [ -f "$HPCDDP_RUN_DIR/state.json" ] && state --continues; then
    status=85 # submit this script again, and the run goes on
fi
exit "$status"
