"""The line for the same job: what its script asks the scheduler for is what the script that was read asks for, or the
difference is listed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpcddp.cli.lint import choose_same_job, format_findings
from hpcddp.cli.request import read_plan, request_parser
from hpcddp.lint.request import read_seconds
from hpcddp.lint.script import read_script, unix_lines
from hpcddp.script.render import render_script

from .lint_cases import CASES

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
RUN = "srun python train.py\n"
SLURM = "#!/bin/bash\n#SBATCH --no-requeue\n"


def all_scripts() -> dict[str, str]:
    files = [*HERE.glob("scripts/*.sh"), *TESTS.glob("golden/*.sh"), *TESTS.glob("captures/pbs-lint/*.sh")]
    found = {str(f.relative_to(TESTS)): f.read_bytes().decode("utf-8", "surrogateescape") for f in sorted(files)}
    cases = ((f"{rule}-{i}", text) for rule, (bad, good, _) in CASES.items() for i, text in enumerate([*bad, *good]))
    headers = {
        "\n".join(line for line in text.split("\n") if line.startswith("#")): (name, text) for name, text in cases
    }
    return {name: with_a_program(text) for name, text in (found | dict(headers.values())).items()}


def with_a_program(text: str) -> str:
    """A script that starts nothing, or hpcddp's supervisor, has no line: its directives are tried with a program."""
    if not re.search(r"\b(srun|mpirun|mpiexec|torchrun|ibrun)\b", text) or "-m hpcddp supervise" in text:
        header = [line for line in unix_lines(text).split("\n") if line.startswith("#")]
        return "\n".join([*header, f"{'srun' if '#SBATCH' in text else 'mpirun'} python train.py", ""])
    return text


SCRIPTS = all_scripts()


def rendered_again(text):
    """The script, the line for it, and the script that the line renders; None where there is no line."""
    script = read_script(unix_lines(text), None, lambda _: True)
    same = choose_same_job(script, None, {})
    if not same.line:
        return None
    words = shlex.split(same.line)
    end = words.index("--")
    args = request_parser("render", "", example="", exits=()).parse_args(words[2:end])
    args.command = words[end + 1 :]
    return script, same, read_script(render_script(read_plan(args, {})), None, lambda _: True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_rendered_script_asks_for_the_same_or_the_rest_is_listed(name):
    found = rendered_again(SCRIPTS[name])
    if found is None:
        return
    script, same, rendered = found
    listed = " ".join([*same.left_out, *same.examples])
    a, b = script.request, rendered.request
    number = {
        "nodes": "nodes",
        "gpus_per_node": "gpus-per-node",
        "cpus_per_node": "cpus-per-rank|cpus_per_node|CPUs",
        "mem_mb": "mem",
    }
    for field, words in number.items():
        old, new = getattr(a, field), getattr(b, field)
        assert old in (None, new) or re.search(f"{words}|{field}|{old}|select|-l {field}", listed), (
            field,
            old,
            new,
            same,
        )
    times = [
        read_seconds(r.walltime.value, s.scheduler) if r.walltime else None for r, s in ((a, script), (b, rendered))
    ]
    assert times[0] in (None, times[1]) or "walltime" in listed, (times, same)
    assert not a.gpu_type or a.gpu_type == b.gpu_type or a.gpu_type in listed
    for option in script.directives.options:
        if script.directives.get(option.name) != option:
            continue  # another of that name counts
        one_of_them = option in (a.size, a.queue, a.walltime, a.account) or option.name in COUNTED
        if one_of_them or (option.name, option.value) in {(o.name, o.value) for o in rendered.directives.options}:
            continue
        assert option.text in listed or (option.name, option.value) in USUAL, (option, same)


# numbers, compared above; and what every script of hpcddp's does
COUNTED = {"--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--gpus", "--gpus-per-task", "--gres"}
COUNTED |= {"--mem", "--cpus-per-gpu", "--ntasks-per-gpu", "-l place", "-l ncpus", "-l mem", "-l ngpus"}
USUAL = {
    ("--no-requeue", ""),
    ("-r", "n"),
    ("-r", "y"),
    ("-j", "oe"),
    ("-j", "eo"),
    ("-j", "y"),
    ("-cwd", ""),
    ("--export", "ALL"),
}


@pytest.mark.parametrize(
    ("header", "run", "line", "left_out"),
    [
        ("--time=2160", RUN, "--walltime 36:00:00", ""),  # minutes, as Slurm reads it
        ("--nodes=1 --ntasks-per-node=2 --gres=gpu:1", RUN, "--nodes 1 --ranks-per-node 2 --gpus-per-node 1", ""),
        (
            "--ntasks=8 --gpus=8",
            RUN,
            "--nodes 1 --gpus-per-node 8",
            "the number of nodes, which the scheduler chooses for 8 slots (the line: 1)",
        ),
        (
            "--gpus=4 --ntasks-per-gpu=1 --cpus-per-task=2",
            RUN,
            "--nodes 1 --gpus-per-node 4 --cpus-per-rank 2",
            "the number of nodes, which the scheduler chooses for 4 slots (the line: 1)",
        ),
        ("--ntasks=1 --gpus=1", RUN, "--nodes 1 --gpus-per-node 1", ""),
        ("--signal=SIGUSR1@120", RUN, "--set signal=120s", ""),
        ("--nodes=2 --ntasks=8 --gpus=8", RUN, "--nodes 2 --gpus-per-node 4", ""),
        ("--nodes=2 --tasks-per-node=8 --gpus-per-n=8", RUN, "--nodes 2 --gpus-per-node 8", ""),  # shortened
        ("--nodes=2 --gpus-per-task=1 --ntasks-per-node=4", RUN, "--nodes 2 --gpus-per-node 4", ""),
        ("--nodes=2 --ntasks-per-gpu=2 --gpus-per-node=2", RUN, "--ranks-per-node 4 --gpus-per-node 2", ""),
        ("--nodes=1 --cpus-per-gpu=6 --gpus-per-node=4 --ntasks-per-node=4", RUN, "--cpus-per-rank 6", ""),
        (
            "--nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96",
            "srun torchrun --nnodes 2 --nproc_per_node 8 train.py --lr 1\n",
            "--gpus-per-node 8 --cpus-per-rank 12 --walltime 1:00:00 -- python train.py --lr 1",
            "",
        ),
        (
            "--nodes=2 --gpus-per-node=4 --cpus-per-task=16",
            "srun accelerate launch --num_machines 2 --machine_rank 0 --num_processes 8 -m bf16.x\n",
            "--gpus-per-node 4 --cpus-per-rank 4 --walltime 1:00:00 -- accelerate launch -m bf16.x",
            "",
        ),
        (
            "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=4",
            "srun torchrun --nnodes 2 --nproc-per-node 4 train.py\n",
            "--nodes 2 --gpus-per-node 4 --cpus-per-rank 4 --walltime 1:00:00 -- python train.py",
            "16 ranks per node (M15)",
        ),
        (
            "--nodes=2 --ntasks-per-node=2 --gpus-per-node=8 --gpus-per-task=4",
            "srun torchrun --nnodes 4 --nproc-per-node 4 train.py\n",
            "--nodes 2 --gpus-per-node 8",
            "",
        ),
        (
            "--nodes=2 --gpus-per-node=4",
            "srun trl sft --num_machines 2 --num_processes 8 --model_name m\n",
            "--gpus-per-node 4 --cpus-per-rank 8 --walltime 1:00:00 -- trl sft --model_name m",
            "",
        ),
        (
            "--nodes=2 --gpus-per-node=4",
            "srun tune run --nnodes 2 --nproc_per_node 4 --rdzv-backend c10d recipe --config c\n",
            "-- tune run --nproc_per_node 4 recipe --config c",
            "",
        ),
        ("--nodes=2 --gpus-per-node=4", "srun axolotl train c.yml\n", "-- axolotl train c.yml", ""),
        ("--nodes=1", 'srun python train.py "$@"\n', "-- python train.py", "the script's own arguments ($@)"),
        ("--nodes=1", "LR=0.1\nsrun python train.py --lr=$LR\n", "-- python train.py --lr=0.1", ""),
        ("--gres=gpu:p6000:1,tmpfs:10G", RUN, "--set gpu_type=p6000", ""),
        ("--gres=gpu:p6000:1,tmpfs:10G", RUN, "--set directives=--gres=tmpfs:10G", ""),
        ("--mem=32GB --nodes=1", RUN, "--set mem_gb=32", ""),
        ("--mem=1500M --nodes=1", RUN, "--set directives=--mem=1500M", ""),
        ("--mem-per-cpu=4G --nodes=1", RUN, "--set directives=--mem-per-cpu=4G", ""),
        ("--mem=0", RUN, "--set directives=--mem=0", ""),
        ("--constraint=a100&nvlink", RUN, "--set 'constraint=a100&nvlink'", ""),
        ("--exclusive", RUN, "--set exclusive=true", ""),
        ("--array=0-7%2", RUN, "--set array=0-7 --set array_limit=2", ""),
        ("--array=1,5,7", RUN, "", "--array 1,5,7 (array '1,5,7' is not FIRST-LAST or FIRST-LAST:STEP)"),
        ("--signal=USR1@90", RUN, "--set signal=90s", ""),
        ("--signal=B:TERM@90", RUN, "", "--signal B:TERM@90"),
        ("--exclude=node3 --nodelist=node1", RUN, "--set 'directives=--exclude=node3 --nodelist=node1'", ""),
        ("--nodes=2", RUN + "srun python evaluate.py\n", "-- python train.py", "srun python evaluate.py (line 5)"),
        ("--nodes=2-4", RUN, "--nodes 2", "--nodes 2-4"),
        ("--time=UNLIMITED", RUN, "--walltime 1:00:00", "--time UNLIMITED"),
        ("--nodes=4 --ntasks=6", RUN, "--nodes 4", "--ntasks 6"),
        ("--nodes=4 --gpus=6", RUN, "--nodes 4", "--gpus 6"),
        ("--partition=gpu --qos=high", RUN, "--queue gpu --set directives=--qos=high", ""),
        ("--nodes=2\n#SBATCH hetjob\n#SBATCH --nodes=1", RUN, "--nodes 2", "the job's other components (hetjob)"),
        (
            "--nodes=1",
            f"module load cuda\nexport MASTER_ADDR=x NCCL_DEBUG=INFO\n{RUN}",
            "",
            "module load cuda; export NCCL_DEBUG",
        ),
        (
            "--gpus-per-node=2",
            "srun apptainer exec a.sif torchrun --nproc_per_node=2 t.py\n",
            "-- python t.py",
            "apptainer exec a.sif",
        ),
        ("--nodes=1", "srun --gres-flags=none python train.py\n", "-- python train.py", "srun --gres-flags"),
        ("-n1 -c8", f"export OMP_NUM_THREADS=4\n{RUN}", "", "OMP_NUM_THREADS=4 (the line: 8)"),
        ("-n1 -c8", f"export OMP_NUM_THREADS=8\n{RUN}", "--cpus-per-rank 8", ""),
        ("-N2", f"srun -N2 -n2 tar xf x.tar\n{RUN}", "-- python train.py", "srun -N2 -n2 tar xf x.tar (line 4)"),
        ("-N2", f"srun -n1 python prepare.py\n{RUN}", "-- python train.py", "srun -n1 python prepare.py (line 4)"),
        (
            "-N2 --gpus-per-node=4",
            "srun -n2 python p.py\nsrun -n2 torchrun --nnodes=2 --nproc-per-node=4 t.py\n",
            "-- python t.py",
            "srun -n2 python p.py (line 4)",
        ),
        ("--nodes=1", "CMD='python train.py --lr=1'\nsrun $CMD\n", "-- python train.py --lr=1", ""),
    ],
)
def test_what_a_slurm_script_asks_for_is_in_the_line_or_named(header, run, line, left_out):
    _, same, rendered = rendered_again(f"{SLURM}#SBATCH {header}\n{run}")
    assert line in same.line
    assert list(same.left_out) == ([left_out] if left_out else [])
    assert not rendered.directives.refusals
    text = format_findings([], [same])
    assert not left_out or f"    not in the line: {left_out}\n" in text


@pytest.mark.parametrize(
    "run",
    [
        "srun conda run -n W1 --no-capture-output python train.py W2\n",
        "srun -c 4 uv run --with W1 python train.py W2\n",
        "srun --label uv run --with W1 torchrun --nproc-per-node 4 train.py W2\n",
        "srun env W1=1 torchrun --nproc-per-node 4 train.py W2\n",
        "timeout W1 srun python train.py W2\n",
        "RUN=srun\ntimeout W1 $RUN python train.py W2\n",
        "HF_HOME=/W1 srun --export=ALL,DATA=/W2 python train.py\n",
        "mpirun -x NCCL_DEBUG=W1 -genv OTHER W2 python train.py W3\n",
        "srun python train.py < W1.txt > W2.txt 2> W3.txt\n",
        "srun python train.py W1 | W2\n",
        "for seed in W1 W2; do srun python train.py; done\n",
        "srun bash -c 'module load W1; A=W2 torchrun --nproc-per-node 4 train.py W3'\n",
        "srun bash -c 'export A=W1; torchrun --nproc-per-node 4 train.py W2'\n",
        "srun python prepare.py W1\ntorchrun --nproc-per-node 4 train.py W2\n",
        "python prepare.py W1\nsrun python train.py W2\n",
        "srun python train.py W1\nsrun python train.py W2\n",
        "torchrun --nproc-per-node 4 train.py W1\ntorchrun --nproc-per-node 4 test.py W2\n",
        "ID=$(srun -n1 python -c W1)\nsrun python train.py W2\n",
    ],
)
def test_what_stands_around_the_program_is_in_the_line_or_listed(run):
    _, same, _ = rendered_again(f"{SLURM}#SBATCH --nodes=2\n{run}")
    listed = " ".join(same.left_out)
    for word in re.findall(r"W\d", run):
        assert (word in same.line) != (word in listed), same


def test_a_command_whose_output_is_read_is_not_the_training():
    _, same, _ = rendered_again(f"{SLURM}#SBATCH --nodes=2\nA=$(srun -n1 bash -c 'hostname -i')\n{RUN}")
    assert same.line.endswith("-- python train.py")
    assert same.left_out == ("srun -n1 bash -c 'hostname -i' (line 4)",)


def test_gpus_of_sockets_are_the_nodes_gpus():
    _, same, _ = rendered_again(
        f"{SLURM}#SBATCH --nodes=1 --ntasks-per-node=2 --gpus-per-socket=1 --sockets-per-node=2\n{RUN}"
    )
    assert "--nodes 1 --gpus-per-node 2" in same.line
    assert "--gpus-per-socket" not in same.line
    assert same.left_out == ("--gpus-per-socket 1", "--sockets-per-node 2")


OPEN = "the number of nodes, which the scheduler chooses for {} slots (the line: 1)"


@pytest.mark.parametrize(
    ("text", "line", "left_out"),
    [
        (
            "#$ -pe mpi 32\nmpirun -np 32 python train.py\n",
            "--set pe=mpi",
            ["32 ranks in all (the line: 4)", OPEN.format(32)],
        ),
        ("#$ -pe mpi 32\nmpirun -np $NSLOTS python train.py\n", "", ["32 ranks in all (the line: 4)", OPEN.format(32)]),
        ("#$ -pe mpi 32\nmpirun python train.py\n", "", ["32 ranks in all (the line: 4)", OPEN.format(32)]),
        ("#$ -pe mpi 20\nmpirun -np 4 python train.py\n", "--set pe=mpi", [OPEN.format(20), "-pe mpi=20"]),
        ("#$ -l rt_F=2\nmpirun -np 8 --map-by ppr:4:node python train.py\n", "--nodes 2", ["-l rt_F=2"]),
        ("#PBS -t 1-3\n#PBS -l nodes=2:ppn=4:gpus=4\nmpirun python train.py\n", "--nodes 2", ["#PBS -t 1-3"]),
        (
            "#PBS -t 1-3\n#PBS -l nodes=2:ppn=4:gpus=4\nmpirun -np $PBS_NP python train.py\n",
            "--site generic-torque --nodes 2 --gpus-per-node 4 --cpus-per-rank 1",
            [],
        ),
        (
            "#PBS -l select=2:ncpus=8:mpiprocs=2:ngpus=2:gpu_model=a100 -l place=scatter\nmpirun python train.py\n",
            "--set constraint=gpu_model=a100",
            [],
        ),
        (
            "#PBS -A proj\n#PBS -W group_list=abc\n#PBS -l select=1:ncpus=8:mpiprocs=1:ompthreads=4\n"
            "mpirun python train.py\n",
            "--account proj",
            ["OMP_NUM_THREADS=4 (the line: 8)", "-W group_list=abc"],
        ),
        (
            "#PBS -l select=2:ngpus=4:mem=8gb\npbsdsh -- torchrun --node_rank $PBS_VNODENUM --nproc-per-node 4 t\n",
            "--set mem_gb=8",
            ["pbsdsh --"],
        ),
    ],
)
def test_what_another_script_asks_for_is_in_the_line_or_listed_and_not_both(text, line, left_out):
    _, same, _ = rendered_again(f"#!/bin/bash\n{text}")
    assert line in same.line
    assert list(same.left_out) == left_out
    assert not set(re.findall(r"--set \w+", same.line)) & set(re.findall(r"--set \w+", " ".join(same.left_out)))


@pytest.mark.parametrize(
    ("run", "unknown"),
    [
        ("srun bash -c 'RANK=$SLURM_PROCID python train.py'\n", ()),
        ('srun bash -c "python train.py $1"\n', ("python train.py $1",)),
        ("srun python train.py --lr=$LR\n", ("--lr=$LR",)),
    ],
)
def test_what_each_ranks_shell_expands_is_no_example_to_change(run, unknown):
    _, same, _ = rendered_again(f"{SLURM}#SBATCH --nodes=1\n{run}")
    assert [word for word in same.examples if not word.startswith("--") or "$" in word] == list(unknown)
