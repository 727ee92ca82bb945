#!/bin/bash
#PBS -N train
#PBS -A abc123
#PBS -q capacity
#PBS -l select=3:mpiprocs=12:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=00:50:05
#PBS -j oe
#PBS -r n
#PBS -k doe
#PBS -l filesystems=home:flare
# Made by hpcddp 1.2.3 for site aurora (https://docs.alcf.anl.gov/aurora/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 12, ranks 36, CPUs per rank 17.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module load frameworks || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
export FI_MR_CACHE_MONITOR=userfaultfd
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128
export no_proxy='admin,*.hostmgmt.cm.aurora.alcf.anl.gov,*.alcf.anl.gov,localhost'

export HPCDDP_HOST_SUFFIX=.hsn.cm.aurora.alcf.anl.gov
read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
MASTER_ADDR=${MASTER_ADDR%%.*}.hsn.cm.aurora.alcf.anl.gov # its name on the network that ranks meet on
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher pals --site aurora -- \
    "$launcher" -n 36 --ppn 12 --depth 17 --cpu-bind list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 12 -- \
    python train.py
