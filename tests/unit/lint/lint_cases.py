"""Rule -> scripts in which it finds its mistake, and scripts as they should be, in which it finds nothing."""

from __future__ import annotations

PBS = "#!/bin/bash\n#PBS -N x\n#PBS -r n\n"
SLURM = "#!/bin/bash\n#SBATCH --job-name=x --no-requeue\n"
TWO = "#PBS -l select=2:ncpus=8:mpiprocs=4:ompthreads=2 -l place=scatter\n"
TASKS = "#SBATCH --nodes=2 --ntasks-per-node=4\n"
NODES = f"{SLURM}#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
ADDR = "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)\n"
RUN = "mpirun -np 8 --map-by ppr:4:node -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py\n"
FULL = f"{PBS}#PBS -l select=4:mpiprocs=192:ompthreads=1 -q rt_HF\n{ADDR}"

# rule: (bad, good, line of the mistake in each bad one)
CASES: dict[str, tuple[list[str], list[str], int]] = {
    "D1": (
        [f"{PBS}#PBS -l select=2 # two nodes\n", f"{PBS}#PBS -l 'select=2\n", f"{SLURM}#SBATCH -n 2 two\n"],
        [f"{PBS}#PBS -l select=1\n", f"{SLURM[:-1]} # a note\n"],
        0,
    ),
    "M1": (
        [
            f"{PBS}#PBS -l select=2:ncpus=8:ompthreads=2 -l place=scatter\n{ADDR}{RUN}",
            f"{PBS}#PBS -l select=1:ncpus=8\nmpiexec -n 8 python train.py\n",
        ],
        [
            f"{PBS}{TWO}{ADDR}{RUN}",
            f"{PBS}#PBS -l select=2:ncpus=8 -l place=scatter\nmpirun -np 2 --map-by ppr:1:node torchrun train.py\n",
            f"{PBS}#PBS -l select=1:ncpus=8\npython train.py\n",
        ],
        4,
    ),
    "M2": (
        [
            f"{PBS}{TWO}NNODES=$(wc -l < $PBS_NODEFILE)\n",
        ],
        [
            f"{PBS}{TWO}NNODES=$(sort -u $PBS_NODEFILE | wc -l)\nNP=$(wc -l < $PBS_NODEFILE)\n",
            f"{PBS}#PBS -l select=2\nNNODES=$(wc -l < $PBS_NODEFILE)\n",
        ],
        5,
    ),
    "M3": (
        [
            f"{PBS}#PBS -l select=1:ncpus=192:mpiprocs=8\n{RUN}",
            f"{PBS}#PBS -l select=1:ncpus=192\ntorchrun --standalone --nproc_per_node=8 train.py\n",
        ],
        [
            f"{PBS}{TWO}{RUN}",
            f"{PBS}#PBS -l select=1:ncpus=192:mpiprocs=8\nexport OMP_NUM_THREADS=24\n{RUN}",
            f"{PBS}#PBS -l select=1:ncpus=192\npython train.py\n",
        ],
        4,
    ),
    "M4": (
        [f"{PBS}#PBS -l select=2:ncpus=8:mpiprocs=4:ompthreads=2\n", f"{PBS}#PBS -l select=2\n"],
        [
            f"{PBS}{TWO}",
            f"{PBS}#PBS -q rt_HF -l select=2:mpiprocs=8:ompthreads=12\n",
            f"{PBS}#PBS -l select=1:ncpus=8\n",
        ],
        4,
    ),
    "M7": (
        [
            f"{PBS}cd $PBS_O_WORKDIR\n#PBS -q gpu\n",
            f"{SLURM}module load x\n\n#SBATCH --nodes=4\n",
            f"{SLURM}\n\n  #SBATCH --nodes=4\n",
            f"{PBS}\n#pbs -q gpu\n",
        ],
        [f"{PBS}\n# a note\n  #PBS -q gpu\ncd x\n", f"{SLURM}##SBATCH --nodes=9\n"],
        5,
    ),
    "M8": (
        [f"{PBS}#PBS -o missing/log\n", f"{PBS}#PBS -o $HOME/log\n", f"{SLURM}\n#SBATCH --output=missing/%x-%j.out\n"],
        [f"{PBS}#PBS -o there/log\n", f"{SLURM}#SBATCH --output=there/%j.out\n#SBATCH -e x-%j.err\n"],
        4,
    ),
    "M9": (
        [f"{PBS}#PBS -q gpuvolta\n#PBS -q dgxa100\n", f"{PBS}#PBS -l select=1\n#PBS -l select=2\n"],
        [f"{PBS}#PBS -q gpu\n#PBS -l select=2 -l place=scatter\n#PBS -l walltime=1:00:00\n"],
        5,
    ),
    "M10": (
        [
            f"{PBS}#PBS -l select=4 -l place=scatter\npython train.py\n",
            f"{SLURM}#SBATCH --nodes=4\n\ntorchrun --nnodes=4 --nproc_per_node=8 train.py\n",
            f"{PBS}#PBS -l nodes=a:ppn=24+b:ppn=24\npython train.py\n",
        ],
        [
            f"{PBS}#PBS -l select=1\npython train.py\n",
            f"{SLURM}#SBATCH --nodes=4\nsrun python train.py\n",
            f"{PBS}{TWO}python -c 'print(1)'\n{RUN}",
            f"{PBS}{TWO}python prepare.py\nfor h in $(sort -u $PBS_NODEFILE); do ssh $h python train.py & done\n",
        ],
        5,
    ),
    "M11": (
        [f"{PBS}MASTER_ADDR=$(head -n1 $PBS_NODEFILE | hostname -f)\n"],
        [f"{PBS}MASTER_ADDR=$(head -n1 $PBS_NODEFILE)\nexport H=$(hostname -f | tr a b)\n"],
        4,
    ),
    "M12": (
        [
            f"{SLURM}srun bash -c 'export MASTER_ADDR=$(hostname); python train.py'\n",
            f"{SLURM}cat > run.sh <<'EOF'\nexport MASTER_ADDR=$(hostname)\nEOF\nsrun bash run.sh\n",
        ],
        [
            f"{SLURM}export MASTER_ADDR=$(hostname)\nsrun bash -c 'python train.py'\n",
            f'{SLURM}srun bash -c "export MASTER_ADDR=$(hostname); python train.py"\n',
        ],
        0,
    ),
    "M13": (
        [
            f"{PBS}export MASTER_PORT=$((10000 + ${{PBS_JOBID%.*}} % 50000))\n",
            f"{PBS[:-1]} -J 0-3\nexport MASTER_PORT=$((10000 + ${{PBS_JOBID%%.*}} % 50000))\n",
        ],
        [
            f"{PBS}id=${{PBS_JOBID%%.*}}\nexport MASTER_PORT=$((12000 + 10#${{id//[!0-9]/}} % 20000))\n",
            f"{SLURM}export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))\n",
            f"{PBS}MASTER_PORT=$((20000 + ${{PBS_JOBID%%[!0-9]*}} % 10000))\n",
            f"{PBS}MASTER_PORT=$((20000 + ${{PBS_JOBID%%.*}} % 10000))\n",
        ],
        4,
    ),
    "M15": (
        [
            f"{SLURM}{TASKS}\nsrun torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
            f"{PBS}{TWO}mpirun -np 8 python -m torch.distributed.run --nproc-per-node 4 train.py\n",
            f"{SLURM}{TASKS}\nsrun accelerate launch train.py\n",
        ],
        [
            f"{SLURM}{TASKS}srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
            f"{PBS}{TWO}mpirun -np 2 --map-by ppr:1:node torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
            f"{SLURM}{TASKS}srun --ntasks-per-node=1 accelerate launch train.py\n",
            f"{SLURM}{TASKS}srun accelerate launch --num_processes 1 train.py\n",
            f"{SLURM}{TASKS}deepspeed --hostfile hosts train.py\n",
            f"{PBS}{TWO}mpirun -np 2 torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
        ],
        5,
    ),
    "M16": (
        [
            f"{PBS}#PBS -l select=2:ngpus=4 -l place=scatter\nexport CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n",
            f"{SLURM}#SBATCH --nodes=2 --gpus=8\n\nexport CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n",
        ],
        [f"{PBS}#PBS -l select=2:ngpus=4 -l place=scatter\nexport CUDA_VISIBLE_DEVICES=3,2,1,0\n"],
        5,
    ),
    "M20": (
        [f"{SLURM}export MPICH_GPU_SUPPORT_ENABLED=1\nexport NCCL_DEBUG=INFO\n"],
        [f"{SLURM}export MPICH_GPU_SUPPORT_ENABLED=0\nexport NCCL_DEBUG=INFO\n"],
        3,
    ),
    "M24": (
        [f"{SLURM}#SBATCH --cpus-per-task=8\nsrun python train.py\n"],
        [
            f"{SLURM}#SBATCH --cpus-per-task=8\nsrun -c 8 python train.py\n",
            f"{SLURM}#SBATCH -c 8\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun python train.py\n",
            f"{SLURM}#SBATCH -c 8\nIP=$(srun -n1 bash -c 'hostname -i')\nsrun -c 8 python train.py\n",
        ],
        4,
    ),
    "D4": (
        [
            f"{SLURM}#SBATCH --mem=4G --mem-per-cpu=1G\n",
            f"{SLURM}#SBATCH --ntasks-per-gpu=1 --gpus-per-task=1 --gpus=4\n",
            f"{SLURM}#SBATCH --cpus-per-gpu=8 -c 8 --gpus=4\n",
            f"{SLURM}#SBATCH --gpus-per-node=4 --gres=gpu:a100:4\n",
            f"{SLURM}#SBATCH --mem-per-gpu=4G\n",
            f"{SLURM}#SBATCH --gpus-per-task=1 --gpus-per-node=2\n",
            f"{SLURM}#SBATCH --ntasks-per-gpu=1\n",
            "#!/bin/bash\n#SBATCH --no-requeue --ntasks-per-gpu=1 --gpus=4\nsrun --gpus-per-task=1 python train.py\n",
            "#!/bin/bash\n#SBATCH --no-requeue --gpus=4\nsrun --mem=4G --mem-per-cpu=1G python train.py\n",
            f"{PBS}#PBS -l select=1:ngpus=4\n#PBS -l ncpus=16\n",
        ],
        [
            f"{PBS}#PBS -l nodes=2:ppn=4,ncpus=8\n",
            f"{PBS}#PBS -l select=1 -l mem=1gb\necho $PBS_NUM_PPN\n",
            f"{SLURM}#SBATCH --mem=4G --gpus=a100:4 --gres=tmp:1G,gpu:a100:4\nsrun --mem-per-cpu=1G python a.py\n",
            f"{SLURM}#SBATCH --nodes=2 --ntasks=8 --ntasks-per-node=4 --gpus=8 --gpus-per-task=1\n",
            f"{SLURM}#SBATCH --ntasks-per-gpu=1 --gpus=4\nsrun --ntasks-per-gpu=2 python train.py\n",
            f"{SLURM}#SBATCH --gpus=2 --cpus-per-gpu=2\nsrun -c 2 python train.py\n",
        ],
        0,
    ),
    "M29": (["#!/bin/bash\n#PBS -N x\n", "#!/bin/bash\n#SBATCH -N1\n"], [PBS, SLURM], 1),
    "M33": (
        [
            f"{PBS}#PBS -l walltime=00:3:00:00\n",
            f"{PBS}#PBS -l walltime=24h\n",
            f"{PBS}#PBS -l walltime=1:30\n",
            f"{SLURM}\n#SBATCH --time=10:00\n",
            f"{SLURM}\n#SBATCH --time=1:00:00:00\n",
        ],
        [
            f"{PBS}#PBS -l walltime=24:00:00\n",
            f"{SLURM}#SBATCH --time=1-00:00:00\n",
        ],
        4,
    ),
    "M34": (
        [f"{PBS}#$ -l rt_F=1\n", f"{SLURM}#SBATCH -N 1\n#PBS -q gpu\n"],
        [PBS, f"{PBS}echo $$ # $#\n"],
        4,
    ),
    "A1": (
        [
            f"{PBS}{TWO}\n{RUN.replace('-x MASTER_ADDR ', '')}",
            f"{PBS}{TWO}MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)\n{RUN}".replace("-x MASTER_ADDR ", ""),
            f"{PBS}{TWO}{ADDR}{RUN}".replace("-x MASTER_ADDR ", ""),
        ],
        [
            f"{PBS}{TWO}{ADDR}{RUN}",
            f"{SLURM}{TASKS}export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\nsrun python train.py\n",
            f"{PBS}{TWO}mpirun -np 8 python -m hpcddp exec -- python train.py\n",
        ],
        0,
    ),
    "A2": (
        [f"{PBS}{TWO}\nmpirun -np $NUM_PROCESSES -x MASTER_ADDR=$A python train.py\n"],
        [
            f"{PBS}{TWO}NUM_PROCESSES=8\n{ADDR}mpirun -np $NUM_PROCESSES -x MASTER_ADDR python train.py\n",
            f"{PBS}{TWO}source ./counts.sh\n{ADDR}mpirun -np $NUM_PROCESSES -x MASTER_ADDR python train.py\n",
            f"{SLURM}{TASKS}srun --ntasks=$SLURM_NTASKS -n ${{N:-4}} python train.py\n",
        ],
        6,
    ),
    "A3": (
        [f"{SLURM}export LOCAL_RANK=$((SLURM_PROCID % 4))\n"],
        [f"{SLURM}export LOCAL_RANK=$SLURM_LOCALID\n"],
        3,
    ),
    "A4": (
        [
            f"{FULL}mpirun -np 32 -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py\n",
            f"{FULL}mpirun -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py\n",
        ],
        [
            f"{FULL.replace('192', '8')}mpirun -np 32 -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py\n",
            f"{FULL.replace('192', '8')}mpirun -x MASTER_ADDR -hostfile $PBS_NODEFILE python train.py\n",
            f"{FULL}mpirun -np 32 --map-by ppr:8:node -x MASTER_ADDR python train.py\n",
            f"{FULL}mpirun -npernode 8 -hostfile $PBS_NODEFILE python train.py\n",
        ],
        6,
    ),
    "A5": (
        [
            f"{SLURM}export MASTER_PORT=29500\n",
            f"{SLURM}torchrun --master_port 29500 train.py\n",
        ],
        [f"{SLURM}export MASTER_PORT=$((12000 + SLURM_JOB_ID % 20000))\ntorchrun --master_port=0 train.py\n"],
        3,
    ),
    "A23": (
        [
            f"{SLURM}srun python train.py 2>&1 | tee log\n",
            f"{SLURM}CMD='python -u train.py --lr=1'; $CMD | tee log\n",
        ],
        [
            f"{SLURM}set -euo pipefail\nsrun python train.py 2>&1 | tee log\n",
            f"{SLURM}srun python train.py 2>&1 | tee log\nexit ${{PIPESTATUS[0]}}\n",
            f"{SLURM}srun python train.py\necho done | tee log\nhostname | tee log\n",
            "#!/bin/bash -o pipefail\nsrun python train.py | tee log\n",
        ],
        3,
    ),
    "A24": (
        [
            f"{SLURM}cat > conf.yaml <<EOF\na: 1\nsrun python train.py\n",
            f"{SLURM}cat <<EOF\na\n\tEOF\npython train.py\n",
        ],
        [
            f"{SLURM}cat <<EOF <<-'X'\na\nEOF\n\tX\npython train.py\n",
            f"{SLURM}((n = 1 << 3))\nif (( n<<2 > 4 )); then python train.py; fi; ((cat) <<< a) | cat\n",
            f'{SLURM}x=$(cat <<E"O"F\na\nEOF\n)\ncat <<E"O"F\nEOF\npython train.py\n',
        ],
        3,
    ),
    "A26": (
        [
            f"{SLURM}{TASKS}srun python train.py --rank $SLURM_PROCID\n",  # more: test_early_expansion.py
            f'{SLURM}{TASKS}srun bash -c "CUDA_VISIBLE_DEVICES=$LOCAL_RANK python train.py"\n',
            f'{SLURM}{TASKS}srun bash -c "NODE_NAME=$SLURMD_NODENAME python train.py"\n',
            f'{SLURM}{TASKS}srun bash -c "python train.py --cache /tmp/$(hostname -s)/data"\n',
            f'{SLURM}{TASKS}srun bash -c "python train.py > $HOSTNAME.log"\n',
            f"{NODES}srun torchrun --nnodes 2 --nproc-per-node 4 --master-addr $A train.py\n",
            f"{NODES}srun bash -c 'torchrun --nnodes=2 --node-rank=0 --nproc-per-node 4 train.py'\n",
            f"{NODES}srun accelerate launch --num_machines 2 --num_processes 8 train.py\n",
            f"{NODES}srun torchrun --nproc-per-node 4 train.py\n",
            f"{NODES}cat > a.sh <<'EOF'\ntorchrun --nnodes 2 --master_addr $A train.py\nEOF\nsrun bash a.sh\n",
            f"{NODES}srun deepspeed --hostfile hosts train.py\n",
            f"{NODES}srun deepspeed --no_ssh --node_rank 0 --hostfile hosts train.py\n",
            f"{PBS}#PBS -l select=2\nmpirun -np 2 torchrun --nnodes 2 --master_addr $A train.py\n",
            f"{SLURM}#SBATCH --nodes=2\n\nsrun bash -c 'torchrun --standalone --nproc-per-node 4 train.py'\n",
        ],
        [
            f"{SLURM}{TASKS}srun bash -c 'python train.py --rank $SLURM_PROCID'\n",
            f"{SLURM}{TASKS}srun bash -c 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK python train.py'\n",
            f'{SLURM}{TASKS}srun bash -c "mkdir -p /tmp/\\$HOSTNAME; python train.py --to \\$(hostname)"\n',
            f'{SLURM}{TASKS}srun bash -c "python train.py --master_addr $HOSTNAME.local --init-method $(hostname)"\n',
            f'{SLURM}{TASKS}srun bash -c "echo from $HOSTNAME; python train.py"\n',
            f'{NODES}srun -N 1 bash -c "python train.py > $HOSTNAME.log"\n',
            f"{NODES}srun torchrun --nnodes 2 --rdzv-backend=c10d --rdzv-endpoint $A:$P train.py\n",
            f"{NODES}srun torchrun --nnodes 2 --node_rank $SLURM_NODEID --rdzv_backend c10d a.py\n",
            f'{NODES}ARGS="--node_rank=$SLURM_PROCID --rdzv_backend c10d"\nsrun torchrun $ARGS a.py\n',
            f"{NODES}srun bash -c 'torchrun --nnodes 2 --node_rank $SLURM_NODEID --master-addr $A train.py'\n",
            f"{NODES}srun -N1 -n1 -w $B torchrun --nnodes 2 --node_rank 1 --master-addr $A train.py &\nwait\n",
            f"{NODES}srun accelerate launch train.py\n",  # its configuration may say more
            f'{NODES}cat > a.json <<EOF\n{{"host": "$HOSTNAME"}}\nEOF\nsrun python train.py --config a.json\n',
            f"{NODES}srun python -m hpcddp exec -- torchrun --nnodes 2 --nproc-per-node 4 train.py\n",
            f"{NODES}srun accelerate launch --config_file a.yaml --num_machines 2 train.py\n",
            f"{NODES}srun bash -c 'deepspeed --no_ssh --node_rank $SLURM_NODEID --hostfile hosts train.py'\n",
            f"{PBS}{TWO}mpirun -np 2 torchrun --nnodes 2 --master_addr $A train.py\n",  # on the first node: A4
            f"{SLURM}#SBATCH --nodes=1\nsrun torchrun --standalone --nproc-per-node 4 train.py\n",
        ],
        0,
    ),
    "A27": (
        [
            f"{SLURM}export MASTER_ADDR=$SLURM_SUBMIT_HOST\n",
            f"{SLURM}export MASTER_ADDR=${{SLURM_LAUNCH_NODE_IPADDR}}\n",
            f"{SLURM}srun torchrun --rdzv_endpoint=$SLURM_SUBMIT_HOST:29400 train.py\n",
            f"{SLURM}srun bash -c 'MASTER_ADDR=$SLURM_SUBMIT_HOST python train.py'\n",
            "#!/bin/bash\n#PBS -N x -r n\nHEAD_NODE=$PBS_O_HOST\n",
        ],
        [
            f"{SLURM}echo from $SLURM_SUBMIT_HOST\nexport MASTER_ADDR=$(hostname)\n",
            f"{SLURM}srun bash -c 'MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR python train.py'\n",
        ],
        3,
    ),
    "A9": (
        [
            f"{SLURM}#SBATCH --nodes=2\n\nsrun torchrun --nnodes 2 --rdzv-endpoint localhost:29400 train.py\n",
            f"{PBS}{TWO}\nexport MASTER_ADDR=localhost\nmpirun python train.py\n",
        ],
        [
            f"{SLURM}export MASTER_ADDR=localhost\nsrun python train.py\n",
        ],
        0,
    ),
    "A29": (
        [
            f"{SLURM}srun bash -c 'export MASTER_PORT=$((20000 + RANDOM % 1000)); python train.py'\n",
            f"{SLURM}srun bash -c 'torchrun --nnodes 2 --master_port $RANDOM train.py'\n",
            f"{SLURM}srun bash -c 'torchrun --nnodes 2 --rdzv-id $RANDOM --rdzv-endpoint $H:$P train.py'\n",
            f"{SLURM}cat > run.sh <<'EOF'\nexport MASTER_PORT=$RANDOM\npython train.py\nEOF\nsrun bash run.sh\n",
            f"{SLURM}srun bash <<'EOF'\nMASTER_PORT=$RANDOM python train.py\nEOF\n",
        ],
        [
            f"{SLURM}export MASTER_PORT=$((20000 + RANDOM % 1000))\nsrun python train.py\n",
            f'{SLURM}srun bash -c "torchrun --nnodes 2 --master_port $((20000 + RANDOM % 99)) train.py"\n',
            f'{SLURM}srun bash -c "MASTER_PORT=$RANDOM python train.py"\n',
            f"{SLURM}cat > run.sh <<EOF\nexport MASTER_PORT=$RANDOM\npython train.py\nEOF\nsrun bash run.sh\n",
            f"{SLURM}srun bash -c 'export MASTER_PORT=$((20000 + SLURM_JOB_ID % 9999)); python train.py'\n",
        ],
        0,
    ),
    "A30": (
        [
            f"{SLURM}#SBATCH --signal=B:USR1@300\nsrun python train.py &\nwait\n",
            f"{SLURM}#SBATCH --signal=B:10@300\ntrap 'touch stop' USR2\nsrun python train.py &\nwait\n",
            f"{SLURM}trap 'touch stop' USR1\nsrun python train.py\n".replace("x --no", "x --signal=B:USR1@300 --no"),
        ],
        [
            f"{SLURM}#SBATCH --signal=B:USR1@300\ntrap 'touch stop' USR1\nsrun python train.py &\nwait\n",
            f"{SLURM}#SBATCH --signal=B:SIGUSR1@300\ntrap handler INT 10\n(srun python train.py) &\nwait\n",
            f"{SLURM}#SBATCH --signal=B:USR1@300\nexec srun python train.py\n",
            f"{SLURM}#SBATCH --signal=USR1@300\nsrun python train.py\n",
        ],
        0,
    ),
    "A31": (
        [
            f"{SLURM}#SBATCH --signal=USR1@90\npython train.py\n",
            f"{SLURM}#SBATCH --signal=SIGTERM@90\ntorchrun --standalone --nproc_per_node 4 train.py\n",
        ],
        [
            f"{SLURM}#SBATCH --signal=USR1@90\nsrun python train.py\n",
            f"{SLURM}#SBATCH --signal=B:USR1@90\ntrap : USR1\npython train.py & wait\n",
            f"{SLURM}#SBATCH --signal=USR1@90\n$LAUNCHER python train.py\n",
            f"{SLURM}#SBATCH --signal=USR1@90\nmpirun python train.py\n",
        ],
        3,
    ),
    "A32": (
        [
            f"{SLURM}#SBATCH --array=0-3\nsrun python train.py || scontrol requeue $SLURM_JOB_ID\n",
            f"{SLURM}#SBATCH -a 0-3\ntrap 'scontrol requeue ${{SLURM_JOB_ID}}' USR1\n",
        ],
        [
            f"{SLURM}srun python train.py || scontrol requeue $SLURM_JOB_ID\n",
            f"{SLURM}#SBATCH -a 0-3\nscontrol requeue ${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}\n",
        ],
        4,
    ),
    "A34": (
        [
            f"{SLURM}srun python train.py &\n",
            f"{SLURM}srun python train.py > log 2>&1 &\necho started\n",
            f"{SLURM}for h in $(scontrol show hostnames); do ssh $h python train.py & done\n",
            f"{SLURM}{{\n  srun python train.py\n}} > log 2>&1 &\necho started\n",
        ],
        [
            f"{SLURM}(while true; do nvidia-smi; sleep 9; done) > gpus.log &\nsrun python train.py\n",
            f"{SLURM}srun python train.py &\nwait\n",
            f"{SLURM}srun python train.py & wait $!\n",
            f"{SLURM}srun python train.py && echo done\n",
            f"{SLURM}srun bash -c 'python train.py & wait'\n",
        ],
        0,
    ),
}

# The same with a site: its facts are what makes these mistakes.
SITE_CASES = {
    "M5": ("abci3", f"{PBS}#PBS -q rt_HF -P g\n#PBS -l select=200:mpiprocs=8:ompthreads=12\n", 5),
    "M25": ("abci3", f"{PBS}#PBS -q rt_HG -P g\n#PBS -l select=1:ncpus=64:mpiprocs=1\n", 5),
    "M34": ("abci3", f"{PBS}#$ -l rt_F=1\n", 4),
    "M4": ("generic-pbs", f"{PBS}#PBS -l select=2:ncpus=4\n", 4),
}
