"""A launcher's command line, as the script prints it."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.ranks.launcher import FromShell, LaunchRequest
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.script.spec import quote_line

SHELL = {
    "launcher": "/opt/mpi/bin/mpirun",
    "HPCDDP_PYTHON": "/opt/env/bin/python",
    "HPCDDP_RUN_DIR": "/runs/a b",
    "HPCDDP_ATTEMPT": "77.1",
    "launch_number": "77",
    "PWD": "/work dir",
    "rendezvous": "node1:12345",
    "PBS_NODEFILE": "/var/spool/it's here",
    "SET": "x y",
}
REQUEST = LaunchRequest(
    nodes=2,
    processes_per_node=4,
    cpus_per_process=8,
    ranks_per_node=4,
    exported=("FOO",),
    exported_if_set=("SET", "UNSET"),
    launcher_options=("--own", "a b"),
)


def line_of(launcher: str, request: LaunchRequest) -> list[str]:
    """The words that bash makes of the printed line."""
    line = LAUNCHERS[launcher].line
    assert line is not None
    printed = " \\\n    ".join(quote_line(words) for words in line(request) if words)
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {printed}"], env=SHELL, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


FORWARDED = "-x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS"


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        (
            "openmpi",
            f"/opt/mpi/bin/mpirun -np 8 --map-by ppr:4:node --bind-to none --own a|b -x PATH -x FOO {FORWARDED} -x SET",
        ),
        ("mpich", "/opt/mpi/bin/mpirun -n 8 -ppn 4 --own a|b"),
        ("intelmpi", "/opt/mpi/bin/mpirun -n 8 -ppn 4 --own a|b"),
        ("pals", "/opt/mpi/bin/mpirun -n 8 --ppn 4 --depth 8 --own a|b"),
        ("ibrun", "env TACC_TASKS_PER_NODE=4 /opt/mpi/bin/mpirun -n 8 -o 0 --own a|b"),  # it takes no hosts
        (
            "srun",
            "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 --own a|b",
        ),
        (
            "torchrun",
            "/opt/env/bin/python -m torch.distributed.run --no-python --nproc-per-node=4 --nnodes=2 "
            "--rdzv-backend=c10d --rdzv-endpoint=node1:12345 --rdzv-id=77",
        ),
    ],
)
def test_the_line_says_all_that_is_to_be_started(launcher: str, words: str) -> None:
    assert line_of(launcher, REQUEST) == [word.replace("|", " ") for word in words.split()]


def test_bash_hands_on_every_word_as_it_is() -> None:
    mounts = FromShell("$PWD:$PWD,$HPCDDP_RUN_DIR", before="--mounts=", after=",/it's:/here")
    request = REQUEST._replace(container_options=((mounts, "--image=a#b c"),))
    assert line_of("srun", request)[-2:] == ["--mounts=/:/,/runs/a b,/it's:/here", "--image=a#b c"]
    listed = line_of("mpich", REQUEST._replace(hostfile="PBS_NODEFILE"))
    assert listed[5:7] == ["-f", "/var/spool/it's here"]
