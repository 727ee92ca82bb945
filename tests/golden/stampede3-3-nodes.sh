#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=h100
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --time=02:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
# Made by hpcddp 1.2.3 for site stampede3 (https://docs.tacc.utexas.edu/hpc/stampede3/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 24.

cd "${SLURM_SUBMIT_DIR:-.}" || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=24

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?is not set: this is a Slurm job script}}
HPCDDP_ATTEMPT+=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}
HPCDDP_DEADLINE=${SLURM_JOB_END_TIME:-$(($(date +%s) - SECONDS + 8405))}
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
site: "stampede3"
nodes: 3
walltime: "02:20:05"
launcher: "openmpi"
command: ["python", "train.py"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "stampede3", "scheduler": "slurm", "launcher": "openmpi", "nodes": 3, "ranks_per_node": 4, "world_size": 12, "gpus_per_node": 4, "cpus_per_rank": 24, "threads_per_rank": 24, "walltime_s": 8405, "queue": "h100", "account": null, "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

# A signal that comes here reaches openmpi as SIGUSR1, and from there all ranks: they save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -np 12 \
    --map-by ppr:4:node --bind-to none \
    -x PATH -x OMP_NUM_THREADS \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py < /dev/null >&3 2>&1 3>&- &
launched=$!
trap 'came=yes; kill -USR1 "$launched" || true' HUP
exec 3>&-
signal=
while :; do # a signal ends the wait, not the launcher
    came=
    status=0
    wait "$launched" || status=$?
    if [ -z "$came" ]; then break; fi
    signal=SIG$(kill -l "$status")
    echo "hpcddp: $signal came and was passed on as SIGUSR1" >&2 || true # the terminal may be gone
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
