#!/bin/bash
#PBS -N train
#PBS -P ab12
#PBS -q gpuhopper
#PBS -l ncpus=144
#PBS -l ngpus=12
#PBS -l mem=3066GB
#PBS -l walltime=07:20:05
#PBS -j oe
#PBS -r n
#PBS -l wd
#PBS -l storage=gdata/ab12+scratch/ab12
#PBS -l jobfs=90GB
# Made by hpcddp 1.2.3 for site gadi (https://opus.nci.org.au/spaces/Help/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 12.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module load openmpi/4.1.7 || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=12
export HF_HUB_OFFLINE=1

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site gadi -- \
    "$launcher" -np 12 --map-by ppr:4:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x HF_HUB_OFFLINE -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
