"""A launcher's command line: complete for named hosts without a scheduler, and the same words as the script prints."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.launch_line import FromShell, LaunchRequest, launch_arguments
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS
from hpcddp.script.words import quote_line

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
NAMED = REQUEST._replace(hosts=("node1", "node2"), program="/mpi/bin/start")


def line_of(launcher: str, request: LaunchRequest) -> list[str]:
    line = LAUNCHERS[launcher].line
    assert line is not None
    return launch_arguments(line(request), SHELL)


FORWARDED = "-x HPCDDP_PYTHON -x HPCDDP_RUN_DIR -x HPCDDP_ATTEMPT -x HPCDDP_DEADLINE -x HPCDDP_LOG_RANKS"


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        (
            "openmpi",
            "/mpi/bin/start -np 8 --map-by ppr:4:node --bind-to none -host node1:4,node2:4 --own a|b -x PATH -x FOO "
            f"{FORWARDED} -x SET",
        ),
        ("mpich", "/mpi/bin/start -n 8 -ppn 4 -hosts node1:4,node2:4 --own a|b"),
        ("intelmpi", "/mpi/bin/start -n 8 -ppn 4 -hosts node1,node2 --own a|b"),
        ("pals", "/mpi/bin/start -n 8 --ppn 4 --depth 8 --hosts node1,node2 --own a|b"),
        ("ibrun", "env TACC_TASKS_PER_NODE=4 /mpi/bin/start -n 8 -o 0 --own a|b"),  # it takes no hosts
        (
            "srun",
            "/mpi/bin/start --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 "
            "--nodelist=node1,node2 --own a|b",
        ),
        (
            "torchrun",
            "/opt/env/bin/python -m torch.distributed.run --no-python --nproc-per-node=4 --nnodes=2 "
            "--rdzv-backend=c10d --rdzv-endpoint=node1:12345 --rdzv-id=77",
        ),
    ],
)
def test_named_hosts_need_no_list_of_a_scheduler(launcher: str, words: str) -> None:
    assert line_of(launcher, NAMED) == [word.replace("|", " ") for word in words.split()]


def test_every_launcher_of_job_files_has_a_line() -> None:
    assert all(LAUNCHERS[name].line for name in JOB_LAUNCHERS)


@pytest.mark.parametrize("launcher", JOB_LAUNCHERS)
@pytest.mark.parametrize("request_", [REQUEST._replace(hostfile="PBS_NODEFILE", bind="none"), NAMED])
def test_bash_reads_the_printed_line_as_the_same_words(launcher: str, request_: LaunchRequest) -> None:
    line = LAUNCHERS[launcher].line
    assert line is not None
    mounts = FromShell("$PWD:$PWD,$HPCDDP_RUN_DIR", before="--mounts=", after=",/it's:/here")
    request_ = request_._replace(container_options=((mounts, "--image=a#b c"),))
    groups = [words for words in line(request_) if words]
    printed = " \\\n    ".join(map(quote_line, groups))
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {printed}"], env=SHELL, cwd="/", capture_output=True, text=True, check=True
    )
    here = SHELL | {"PWD": "/"}  # bash sets it
    assert done.stdout.split("\0")[:-1] == launch_arguments(groups, here)


def test_a_shell_variable_that_is_not_set_is_named() -> None:
    words = LAUNCHERS["mpich"].line
    assert words is not None
    with pytest.raises(LaunchError, match=r"\$PBS_NODEFILE, which is not set"):
        launch_arguments(words(REQUEST._replace(hostfile="PBS_NODEFILE")), {"launcher": "mpiexec"})
