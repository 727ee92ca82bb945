#!/bin/bash
#PBS -N chain
#PBS -l select=1:ncpus=1:mpiprocs=1:ompthreads=1
#PBS -l place=scatter
#PBS -l walltime=00:10:00
#PBS -j oe
#PBS -r n
# Made by hpcddp 0.1.0 for site generic-pbs (https://github.com/openpbs/openpbs):
#   hpcddp render --site generic-pbs --nodes 1 --ranks-per-node 1 --name chain --global-batch 8 --set launcher=openmpi --set chain=3 --set walltime=0:10:00 --set gpus_per_node=0 --set cpus_per_rank=1 -- python train.py chain
# Nodes 1, ranks per node 1, ranks 1, CPUs per rank 1.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/home/user/hpcddp/.venv/bin/python3
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export PYTHONPATH=/home/user/hpcddp"${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1

HPCDDP_RUN_DIR="$PWD"/runs/chain
HPCDDP_ATTEMPT=${PBS_JOBID//]/} # 12[3].pbs1, one job of an array, becomes 12-3.pbs1
HPCDDP_ATTEMPT=${HPCDDP_ATTEMPT//[/-}
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 600))
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS
read -r MASTER_ADDR < "$PBS_NODEFILE" # the first host is a candidate: the ranks verify it
export MASTER_ADDR

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "generic-pbs"
name: "chain"
nodes: 1
ranks_per_node: 1
gpus_per_node: 0
cpus_per_rank: 1
walltime: "00:10:00"
launcher: "openmpi"
global_batch: 8
chain: 3
command: ["python", "train.py", "chain"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "chain", "site": "generic-pbs", "scheduler": "pbs", "launcher": "openmpi", "nodes": 1, "ranks_per_node": 1, "world_size": 1, "gpus_per_node": 0, "cpus_per_rank": 1, "threads_per_rank": 1, "walltime_s": 600, "queue": null, "account": null, "global_batch": 8, "command": ["python", "train.py", "chain"], "run_dir": "runs/chain", "created_by": "hpcddp render --site generic-pbs --nodes 1 --ranks-per-node 1 --name chain --global-batch 8 --set launcher=openmpi --set chain=3 --set walltime=0:10:00 --set gpus_per_node=0 --set cpus_per_rank=1 -- python train.py chain"}
HPCDDP_PLAN

state() { # how far the run is, by the state.json that its ranks write
    "$HPCDDP_PYTHON" -m hpcddp state "$@" < /dev/null
}

# The chain: at most 3 attempts. Each queues the next before it starts, so that no kill breaks it.
left=$(state --chain 3) || exit # it says why
if [ -z "$left" ]; then exit 0; fi # nothing is left to do
next=
if [ "$left" -gt 0 ]; then
    from=$PBS_O_WORKDIR
    follow=(qsub -W "depend=afterany:$PBS_JOBID" "$attempt/script.sh")
    cancel=(qdel)
    if next=$(cd "$from" && "${follow[@]}"); then
        echo "$next" > "$attempt/next"
    else
        next=
        echo "hpcddp: the next attempt is not queued. On a login node: cd $from && ${follow[*]}" >&2
    fi
fi

# What signals come here go on as SIGUSR1: openmpi lives on, and gives it to all ranks, which save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -np 1 \
    --map-by ppr:1:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x PYTHONPATH -x OMP_NUM_THREADS -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec -- \
    python train.py chain < /dev/null >&3 2>&1 3>&- &
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
if [ -f "$HPCDDP_RUN_DIR/state.json" ] && state --continues; then
    if [ -z "$next" ] && [ "$status" -eq 0 ]; then status=85; fi # nobody goes on by himself
elif [ -n "$next" ]; then
    "${cancel[@]}" "$next" || echo "hpcddp: $next is still queued; it will see that nothing is left to do" >&2
fi
exit "$status"
