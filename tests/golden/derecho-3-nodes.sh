#!/bin/bash
#PBS -N train
#PBS -A abc123
#PBS -q main
#PBS -l select=3:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB:ompthreads=16
#PBS -l place=scatter
#PBS -l walltime=07:20:05
#PBS -j oe
#PBS -r n
#PBS -k eod
#PBS -l job_priority=economy
# Made by hpcddp 1.2.3 for site derecho (https://ncar-hpc-docs.readthedocs.io/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 16.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module --force purge || exit
module load ncarenv/24.12 || exit
module load nvhpc || exit
module load cuda/12.3.2 || exit
module load cray-mpich || exit
module load conda || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=16
export NCCL_SOCKET_IFNAME=hsn
export NCCL_IB_DISABLE=1
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_MR_CACHE_MONITOR=userfaultfd

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=${PBS_JOBID//]/} # 12[3].pbs1, one job of an array, becomes 12-3.pbs1
HPCDDP_ATTEMPT=${HPCDDP_ATTEMPT//[/-}
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 26405))
HPCDDP_LOG_RANKS=1 # every rank but the first writes into a file of its own
HPCDDP_ATTEMPT+=${HPCDDP_LAUNCH:+-$HPCDDP_LAUNCH} # in one job, hpcddp launch may start several
export HPCDDP_PYTHON HPCDDP_RUN_DIR HPCDDP_ATTEMPT HPCDDP_DEADLINE HPCDDP_LOG_RANKS
read -r MASTER_ADDR < "$PBS_NODEFILE" # the first host is a candidate: the ranks verify it
export MASTER_ADDR

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
site: "derecho"
nodes: 3
walltime: "07:20:05"
account: "abc123"
command: ["python", "train.py"]
job_priority: "economy"
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "derecho", "scheduler": "pbs", "launcher": "pals", "nodes": 3, "ranks_per_node": 4, "world_size": 12, "gpus_per_node": 4, "cpus_per_rank": 16, "threads_per_rank": 16, "walltime_s": 26405, "queue": "main", "account": "abc123", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

# A signal that comes here reaches pals as SIGUSR1, and from there all ranks: they save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -n 12 --ppn 4 --depth 16 --cpu-bind none \
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
