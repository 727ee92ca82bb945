#!/bin/bash
# Made by hpcddp 1.2.3 for site local (https://docs.open-mpi.org/en/main/launching-apps/quickstart.html):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 2, ranks 2, CPUs per rank 3.


set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=3

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=local-$(date +%Y%m%dT%H%M%S)-$$
HPCDDP_DEADLINE= # nothing ends a job here
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
HPCDDP_ATTEMPT+=${HPCDDP_LAUNCH:+-$HPCDDP_LAUNCH} # in one job, hpcddp launch may start several
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS

state() { # how far the run is, by the state.json that its ranks write
    "$HPCDDP_PYTHON" -m hpcddp state "$@" < /dev/null
}

# The run: an unfinished one of this command is resumed, else a new one begins. No other job writes it until this one ends.
run=$(state "$HPCDDP_RUN_DIR" --begin --process $$ -- \
    python train.py) || exit # it says why
HPCDDP_RUN_DIR=${run%%$'\n'*}
trap 'state --end || true' EXIT

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "local"
ranks_per_node: 2
launcher: "torchrun"
command: ["python", "train.py"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "local", "scheduler": "local", "launcher": "torchrun", "nodes": 1, "ranks_per_node": 2, "world_size": 2, "gpus_per_node": 0, "cpus_per_rank": 3, "threads_per_rank": 3, "walltime_s": 604800, "queue": "here", "account": null, "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

# A signal that comes here reaches torchrun as SIGTERM, and from there all ranks: they save and stop within 30 seconds.
trap 'came=yes; kill -TERM "$launched" || true' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
    "$HPCDDP_PYTHON" -m torch.distributed.run --no-python --nproc-per-node=2 --nnodes=1 \
    --standalone \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py < /dev/null >&3 2>&1 3>&- &
launched=$!
trap 'came=yes; kill -TERM "$launched" || true' HUP
exec 3>&-
signal=
while :; do # a signal ends the wait, not the launcher
    came=
    status=0
    wait "$launched" || status=$?
    if [ -z "$came" ]; then break; fi
    signal=SIG$(kill -l "$status")
    echo "hpcddp: $signal came and was passed on as SIGTERM" >&2 || true # the terminal may be gone
done
trap '' HUP TERM USR1 USR2 INT # a few lines are left
wait "$tee" 2> /dev/null || true

if [ "$status" -ne 0 ]; then
    echo "hpcddp: the launcher ended with status $status; the ranks' logs are in $attempt/logs" >&2 || true
fi
trap - EXIT
if state --end ${signal:+--signal $signal} && [ "$status" -eq 0 ]; then
    status=85 # unfinished: submit this script again to resume the run
fi
exit "$status"
