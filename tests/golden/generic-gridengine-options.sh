#!/bin/bash
#$ -N train
#$ -cwd
#$ -pe mpi 96
#$ -l gpu=2
#$ -l h_rt=01:20:05
#$ -j y
#$ -o job.log
#$ -r y
#$ -ar 55
#$ -t 1-9
#$ -tc 5
#$ -hold_jid 1234,77
#$ -h
#$ -m e
#$ -S /bin/bash
# Made by hpcddp 1.2.3 for site generic-gridengine (https://arc.liv.ac.uk/trac/SGE):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 8.

cd "${SGE_O_WORKDIR:-.}" || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8

hostfile=$(mktemp) # what Grid Engine lists as "host slots queue cores", as mpiexec reads it
while read -r host _; do
    echo "$host:4"
done < "${PE_HOSTFILE:?is not set: this is a Grid Engine job script}" > "$hostfile"
read -r MASTER_ADDR _ < "$PE_HOSTFILE" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler gridengine --launcher mpich --site generic-gridengine -- \
    "$launcher" -n 12 -ppn 4 -f "$hostfile" \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 2 -- \
    python train.py
