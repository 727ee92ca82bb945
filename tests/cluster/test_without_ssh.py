"""mpirun over hosts that ssh does not reach, as between the nodes of many PBS clusters.

`pbs_tmrsh` is a stand-in here, and says so: as the real one it has no shell, refuses ssh's options, and wants a host as
the job's list has it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from livecluster import DOMAIN, Cluster
from mpis import NAMES, Mpi, find_mpi

pytestmark = [pytest.mark.cluster]

TMRSH = """\
#!/bin/sh
# a stand-in for PBS's, no scheduler
[ "$1" = -n ] && shift
case $1 in -*) echo "usage: pbs_tmrsh [-n][-l username] host [-n][-l username] command" >&2; exit 255 ;; esac
grep -qx "$1" "$PBS_NODEFILE" || { echo "pbs_tmrsh: host \\"$1\\" is not a node in job <$PBS_JOBID>" >&2; exit 255; }
read -r pid < "$TESTCLUSTER_DIR/hosts/${1%%.*}/pid"
shift
exec env -i HOME=/root PATH=/bin:/usr/bin PBS_JOBID="$PBS_JOBID" \\
    nsenter -t "$pid" --net --uts --mount --ipc --pid --wd=/ "$@" </dev/null
"""


def in_pbs_job(cluster: Cluster, shared: Path, mpi: Mpi, *, has_tmrsh: bool) -> dict[str, str]:
    """The variables of a pretended PBS job on node1 and node2. Its script is on login, whence hosts can be entered."""
    (shared / "nodes").write_text("".join(f"{host}.{DOMAIN}\n" for host in ("node1", "node2")))
    (shared / "bin").mkdir()
    if has_tmrsh:
        (shared / "bin/pbs_tmrsh").write_text(TMRSH)
        (shared / "bin/pbs_tmrsh").chmod(0o755)
    return mpi.env | {
        "PATH": f"{shared}/bin:{mpi.env['PATH']}",
        "TESTCLUSTER_DIR": str(cluster.state),
        "PBS_NODEFILE": str(shared / "nodes"),
        "PBS_JOBID": "7.server",
        "PBS_ENVIRONMENT": "PBS_BATCH",
    }


def launch(mpi: Mpi) -> list[str]:
    size = ["--launcher", mpi.launcher, "--ranks-per-node", "2", "--walltime", "10m", "--name", "t"]
    return ["hpcddp", "launch", *size, "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE; hostname"]


@pytest.mark.parametrize("name", NAMES)
def test_an_mpirun_reaches_the_other_hosts_of_a_pbs_job_without_ssh(cluster: Cluster, shared: Path, name: str) -> None:
    mpi = find_mpi(name)
    env = in_pbs_job(cluster, shared, mpi, has_tmrsh=True)
    done = cluster.sh(launch(mpi), cwd=shared, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ssh does not reach node1.{DOMAIN}: {mpi.launcher} is given pbs_tmrsh in its place" in done.stderr
    logs = "".join(path.read_text() for path in shared.glob("runs/t/attempts/*/logs/rank-*"))
    assert sorted(re.findall(r"rank (\d) of 4", done.stdout + logs)) == ["0", "1", "2", "3"]
    assert logs.count("node2") == 2
    assert (done.stdout + logs).count("node1") == 2


def without_pbs(path: str, folder: Path) -> str:
    """The same programs, but for those of a PBS that this machine may have."""
    folder.mkdir()
    for program in (program for place in path.split(":") for program in Path(place).glob("*")):
        link = folder / program.name
        if not program.name.startswith("pbs_") and not link.is_symlink():
            link.symlink_to(program)
    return str(folder)


def test_where_neither_ssh_nor_pbs_tmrsh_is_there_the_job_says_what_is_missing(cluster: Cluster, shared: Path) -> None:
    mpi = find_mpi(NAMES[0])
    env = in_pbs_job(cluster, shared, mpi, has_tmrsh=False)
    own, system = env["PATH"].split(":/usr/bin:")
    env |= {"PATH": f"{own}:{without_pbs(f'/usr/bin:{system}', shared / 'programs')}", "PBS_EXEC": str(shared)}
    done = cluster.sh(launch(mpi), cwd=shared, env=env)
    assert done.returncode != 0
    assert f"ssh does not reach node1.{DOMAIN}, and pbs_tmrsh is not on PATH" in done.stderr
    assert f"hint: give yourself ssh between the nodes (ssh node1.{DOMAIN} true)" in done.stderr
