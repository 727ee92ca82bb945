#!/bin/bash
#$ -N train
#$ -cwd
#$ -l node_f=3
#$ -l h_rt=02:20:05
#$ -j y
#$ -r n
# Made by hpcddp 1.2.3 for site tsubame4 (https://www.t4.gsic.titech.ac.jp/en/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 48.

cd "${SGE_O_WORKDIR:-.}" || exit

module load openmpi/5.0.2-gcc || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=48

hostfile=$(mktemp) # what Grid Engine lists as "host slots queue cores", as mpirun reads it
while read -r host _; do
    echo "$host slots=4"
done < "${PE_HOSTFILE:?is not set: this is a Grid Engine job script}" > "$hostfile"
read -r MASTER_ADDR _ < "$PE_HOSTFILE" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler gridengine --launcher openmpi --site tsubame4 \
    --chain 6 \
    --submit-option=-g --submit-option=tga-abc -- \
    "$launcher" -np 12 --map-by ppr:4:node --bind-to none -hostfile "$hostfile" \
    -x PATH -x OMP_NUM_THREADS -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
