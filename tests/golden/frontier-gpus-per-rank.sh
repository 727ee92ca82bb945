#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=abc123
#SBATCH --partition=batch
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=14
#SBATCH --time=01:20:05
#SBATCH --output=%x-%j.out
#SBATCH --no-requeue
#SBATCH --network=disable_rdzv_get
# Made by hpcddp 1.2.3 for site frontier (https://docs.olcf.ornl.gov/systems/frontier_user_guide.html):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 14.

cd "${SLURM_SUBMIT_DIR:-.}" || exit

module load PrgEnv-gnu/8.7.0 || exit
module load cpe/26.03 || exit
module load miniforge3/23.11.0-0 || exit
module load rocm/7.1.1 || exit
module load rccl-net-plugin || exit
module load craype-accel-amd-gfx90a || exit
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH" || exit
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen" MIOPEN_CUSTOM_CACHE_DIR="/tmp/$USER-miopen" || exit

set -e # from here on a line that fails ends the job
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=14
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export http_proxy=http://proxy.ccs.ornl.gov:3128/
export https_proxy=http://proxy.ccs.ornl.gov:3128/
export HPCDDP_GPUS_PER_RANK=2

HPCDDP_RUN_DIR="$PWD"/runs/train
HPCDDP_ATTEMPT=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?is not set: this is a Slurm job script}}
HPCDDP_ATTEMPT+=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}
HPCDDP_DEADLINE=${SLURM_JOB_END_TIME:-$(($(date +%s) - SECONDS + 4805))}
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
site: "frontier"
nodes: 3
gpus_per_rank: 2
walltime: "01:20:05"
account: "abc123"
command: ["python", "train.py"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "train", "site": "frontier", "scheduler": "slurm", "launcher": "srun", "nodes": 3, "ranks_per_node": 4, "world_size": 12, "gpus_per_node": 8, "cpus_per_rank": 14, "threads_per_rank": 14, "walltime_s": 4805, "queue": "batch", "account": "abc123", "global_batch": null, "command": ["python", "train.py"], "run_dir": "runs/train", "created_by": "hpcddp render job.yaml", "gpus_per_rank": 2}
HPCDDP_PLAN

# A signal that comes here reaches srun as SIGUSR1, and from there all ranks: they save and stop.
trap 'came=yes; kill -USR1 "$launched" || true' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
srun --nodes=3 --ntasks=12 --ntasks-per-node=4 \
    --cpus-per-task=14 --kill-on-bad-exit=1 \
    --gpus-per-task=2 --gpu-bind=closest \
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
