#!/bin/bash
#PBS -N torch.distributed.run
#PBS -P gabc12345
#PBS -q rt_HF
#PBS -l select=3:mpiprocs=4:ompthreads=24
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -r n
#PBS -k oe
# Made by hpcddp 1.2.3 for site abci3 (https://docs.abci.ai/v3/en/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 48.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

source /etc/profile.d/modules.sh
module load cuda/12.6/12.6.1 || exit
module load cudnn/9.5/9.5.1 || exit
module load hpcx/2.20 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH"
export OMP_NUM_THREADS=24

HPCDDP_RUN_DIR="$PWD"/runs/torch.distributed.run
HPCDDP_ATTEMPT=${PBS_JOBID//]/} # 12[3].pbs1, one job of an array, becomes 12-3.pbs1
HPCDDP_ATTEMPT=${HPCDDP_ATTEMPT//[/-}
HPCDDP_DEADLINE=$(($(date +%s) - SECONDS + 3600))
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
    python -m torch.distributed.run --nproc-per-node 4 train.py --batch '{per_rank_batch}') || exit # it says why
HPCDDP_RUN_DIR=${run%%$'\n'*}
trap 'state --end || true' EXIT

attempt=$HPCDDP_RUN_DIR/attempts/$HPCDDP_ATTEMPT
mkdir -p "$attempt/logs" "$attempt/env"
if [ -f "$0" ]; then cp "$0" "$attempt/script.sh"; fi
cat > "$HPCDDP_RUN_DIR/job.yaml" << 'HPCDDP_JOB'
site: "abci3"
nodes: 3
ranks_per_node: 4
account: "gabc12345"
global_batch: 96
command: ["python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py", "--batch", "{per_rank_batch}"]
HPCDDP_JOB
cat > "$HPCDDP_RUN_DIR/plan.json" << 'HPCDDP_PLAN'
{"schema": 1, "name": "torch.distributed.run", "site": "abci3", "scheduler": "pbs", "launcher": "torchrun", "nodes": 3, "ranks_per_node": 4, "world_size": 12, "gpus_per_node": 8, "cpus_per_rank": 48, "threads_per_rank": 24, "walltime_s": 3600, "queue": "rt_HF", "account": "gabc12345", "global_batch": 96, "command": ["python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py", "--batch", "{per_rank_batch}"], "run_dir": "runs/torch.distributed.run", "created_by": "hpcddp render job.yaml"}
HPCDDP_PLAN

# A signal that comes here is not passed on: -m torch.distributed.run would end before its ranks have saved. They stop by their deadline.
trap 'came=yes' TERM USR1 USR2 INT
trap '' HUP # a closed terminal sends it to every process: the launcher and the ranks ignore it, this shell does not
exec 3> >(trap '' TERM USR1 USR2 INT && exec tee -a "$attempt/logs/job.log") # what the ranks print, here and there
tee=$!
"$launcher" -np 3 \
    --map-by ppr:1:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    ${UCX_NET_DEVICES:+-x UCX_NET_DEVICES} \
    ${UCX_MAX_RNDV_RAILS:+-x UCX_MAX_RNDV_RAILS} \
    ${UCX_MAX_EAGER_RAILS:+-x UCX_MAX_EAGER_RAILS} \
    "$HPCDDP_PYTHON" -m hpcddp exec --nodes 3 --ranks-per-node 4 --global-batch 96 -- \
    python -m torch.distributed.run --nproc-per-node 4 train.py --batch '{per_rank_batch}' < /dev/null >&3 2>&1 3>&- &
launched=$!
trap 'came=yes' HUP
exec 3>&-
signal=
while :; do # a signal ends the wait, not the launcher
    came=
    status=0
    wait "$launched" || status=$?
    if [ -z "$came" ]; then break; fi
    signal=SIG$(kill -l "$status")
    echo "hpcddp: $signal came and was not passed on" >&2 || true # the terminal may be gone
done
trap '' HUP TERM USR1 USR2 INT # a few lines are left
wait "$tee" 2> /dev/null || true

if [ "$status" -ne 0 ]; then
    echo "hpcddp: the launcher ended with status $status; the ranks' logs are in $attempt/logs" >&2 || true
fi
trap - EXIT
if state --end && [ "$status" -eq 0 ]; then
    status=85 # unfinished: submit this script again to resume the run
fi
exit "$status"
