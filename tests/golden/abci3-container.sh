#!/bin/bash
#PBS -N train
#PBS -P gabc12345
#PBS -q rt_HF
#PBS -l select=3:mpiprocs=8:ompthreads=12
#PBS -l walltime=100:20:05
#PBS -j oe
#PBS -r n
#PBS -k oe
#PBS -v USE_SSH=1,BEEOND_ON=1
# Made by hpcddp 1.2.3 for site abci3 (https://docs.abci.ai/v3/en/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 8, ranks 24, CPUs per rank 24.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

source /etc/profile.d/modules.sh
module load cuda/12.6/12.6.1 || exit
module load cudnn/9.5/9.5.1 || exit
module load hpcx/2.20 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/usr/bin/python3
export APPTAINERENV_PREPEND_PATH="${HPCDDP_PYTHON%/*}" SINGULARITYENV_PREPEND_PATH="${HPCDDP_PYTHON%/*}"
export OMP_NUM_THREADS=12

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=${PBS_JOBID//]/} # 12[3].pbs1, one job of an array, becomes 12-3.pbs1
HPCDDP_ATTEMPT=${HPCDDP_ATTEMPT//[/-}
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 361205))
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
HPCDDP_ATTEMPT+=${HPCDDP_LAUNCH:+-$HPCDDP_LAUNCH} # in one job, hpcddp launch may start several
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS
read -r MASTER_ADDR < "$PBS_NODEFILE" # the first host is a candidate: the ranks verify it
export MASTER_ADDR

state() { # how far the run is, by the state.json that its ranks write
    singularity exec --nv --pwd "$PWD" --bind "$PWD" --bind "${HPCDDP_RUN_DIR%/*}" \
    'torch 2.sif' \
    "$HPCDDP_PYTHON" -m hpcddp state "$@" < /dev/null
}

mkdir -p "${HPCDDP_RUN_DIR%/*}" # the container sees it
# The run: an unfinished one of this command is resumed, else a new one begins. No other job writes it until this one ends.
run=$(state "$HPCDDP_RUN_DIR" --begin --process $$ --container -- \
    python train.py) || exit # it says why
HPCDDP_RUN_DIR=${run%%$'\n'*}
trap 'state --end || true' EXIT

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "abci3"
nodes: 3
walltime: "100:20:05"
account: "gabc12345"
python: "/usr/bin/python3"
container: "torch 2.sif"
directives: ["-v BEEOND_ON=1"]
command: ["python", "train.py"]
ssh: "1"
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "abci3", "scheduler": "pbs", "launcher": "openmpi", "nodes": 3, "ranks_per_node": 8, "world_size": 24, "gpus_per_node": 8, "cpus_per_rank": 24, "threads_per_rank": 12, "walltime_s": 361205, "queue": "rt_HF", "account": "gabc12345", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

# A signal that comes here reaches openmpi as SIGUSR1, and from there all ranks: they save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -np 24 \
    --map-by ppr:8:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR -x APPTAINERENV_PREPEND_PATH -x SINGULARITYENV_PREPEND_PATH \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    ${UCX_NET_DEVICES:+-x UCX_NET_DEVICES} \
    ${UCX_MAX_RNDV_RAILS:+-x UCX_MAX_RNDV_RAILS} \
    ${UCX_MAX_EAGER_RAILS:+-x UCX_MAX_EAGER_RAILS} \
    singularity exec --nv --pwd "$PWD" --bind "$PWD" --bind "${HPCDDP_RUN_DIR%/*}" \
    'torch 2.sif' \
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
