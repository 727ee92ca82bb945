#!/bin/bash
#PBS -N train
#PBS -A abc123
#PBS -q debug-scaling
#PBS -l select=3:mpiprocs=4:ompthreads=8:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:50:05
#PBS -j oe
#PBS -r n
#PBS -k doe
#PBS -l filesystems=home:eagle:grand
# Made by hpcddp 1.2.3 for site polaris (https://docs.alcf.anl.gov/polaris/):
#   hpcddp render job.yaml
# Nodes 3, ranks per node 4, ranks 12, CPUs per rank 16.

cd "${PBS_O_WORKDIR:-.}" || exit # PBS starts in the home folder

module use /soft/modulefiles || exit
module load conda || exit
conda activate || exit

set -e # from here on a line that fails ends the job
launcher=$(type -P mpiexec) || launcher=mpiexec # the site's goes before the environment's
HPCDDP_PYTHON=/opt/env/bin/python
export PATH="${HPCDDP_PYTHON%/*}:$PATH" OMP_NUM_THREADS=8
export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export TMPDIR=/tmp
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128
export no_proxy='admin,polaris-adminvm-01,localhost,*.cm.polaris.alcf.anl.gov,polaris-*,*.polaris.alcf.anl.gov,*.alcf.anl.gov'
export CUDA_VISIBLE_DEVICES=3,2,1,0 # a rank's GPU is the one next to its CPUs

read -r MASTER_ADDR < "${PBS_NODEFILE:?is not set: this is a PBS job script}" # a candidate: the ranks verify it
export HPCDDP_PYTHON MASTER_ADDR

exec "$HPCDDP_PYTHON" -m hpcddp supervise --script "$0" --name train --scheduler pbs --launcher pals --site polaris -- \
    "$launcher" -n 12 --ppn 4 --depth 16 --cpu-bind list:0-7,32-39:8-15,40-47:16-23,48-55:24-31,56-63 \
    "$HPCDDP_PYTHON" -m hpcddp exec --gpus-per-node 4 -- \
    python train.py
