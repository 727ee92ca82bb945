#!/bin/bash
#PBS -N train
#PBS -A abc123
#PBS -q by-gpu
#PBS -l select=4:mpiprocs=1:ompthreads=16
#PBS -l walltime=02:20:05
#PBS -j oe
#PBS -r n
#PBS -k doe
#PBS -l filesystems=home:eagle
# Made by hpcddp 1.2.3 for site sophia (https://docs.alcf.anl.gov/sophia/):
#   hpcddp render job.yaml
# Nodes 1, ranks per node 4, ranks 4, CPUs per rank 32.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

. /etc/profile
module use /soft/modulefiles || exit
module load compilers/openmpi || exit
module load conda || exit
conda activate base || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpirun) || launcher=mpirun # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=16
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher openmpi --site sophia -- \
    "$launcher" -np 4 --map-by ppr:4:node --bind-to none -hostfile "$PBS_NODEFILE" \
    -x PATH -x OMP_NUM_THREADS -x http_proxy -x https_proxy -x MASTER_ADDR \
    -x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS \
    ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
