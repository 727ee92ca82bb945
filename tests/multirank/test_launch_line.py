"""Each MPI's own mpirun understands its line once it names other hosts."""

from __future__ import annotations

import shlex

import pytest

from hpcddp.ranks.launcher import LaunchRequest
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.script.spec import quote_line
from hpcddp.supervisor.order import LaunchLine, name_hosts

pytestmark = pytest.mark.multirank

# Stands in for ssh to hosts that are all this machine: [options] HOST COMMAND … Each host has a folder of its own for
# temporary files: two daemons of Open MPI 4 in one session directory end each other (in 11 runs of 100).
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
export TMPDIR="$0.$1"
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""
AGENT_OPTIONS = {
    "openmpi": ("--mca", "plm_rsh_agent"),
    "mpich": ("-launcher-exec",),
    "intelmpi": ("-launcher-exec",),
}


def test_two_processes_start_on_each_of_two_named_hosts_and_get_what_is_exported(flavour, run, tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    row = LAUNCHERS[flavour.launcher]
    request = LaunchRequest(
        nodes=3,
        processes_per_node=2,
        exported=("FOO",),
        exported_if_set=("LD_LIBRARY_PATH", "UNSET"),
        launcher_options=(*AGENT_OPTIONS[flavour.launcher], str(agent)),
    )
    env = {**flavour.env, **dict(row.settings), "FOO": "a b", "launcher": f"{flavour.prefix}/bin/{row.program}"}
    printed = " ".join(map(quote_line, row.line(request)))
    words = run(["bash", "-c", f"printf '%s\\0' {printed}"], env=env).stdout.split("\0")[:-1]
    words, listed = name_hosts(words, row, LaunchLine((), (), 3), ("node1", "node2"), str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text(listed)
    names = (row.rank, row.world_size, row.local_rank, row.local_world_size, "FOO")
    told = " ".join(f"${{{name}}}" for name in names)
    # Open MPI 5's mpirun may not end if a process ends before all of them were started (3 runs of 30)
    here = shlex.quote(str(tmp_path / "here"))
    together = f": > {here}.${row.rank}; until [ $(ls {here}.? | wc -l) = 4 ]; do sleep 0.02; done"
    done = run([*words, "sh", "-c", f'echo "{told}"; {together}'], env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 4 0 2 a b", "1 4 1 2 a b", "2 4 0 2 a b", "3 4 1 2 a b"]
