"""LSF: its allocations are read; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import count_hosts, read_named_file
from hpcddp.schedulers.row import Commands, Directives, Scheduler, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.schedulers.allocation import HostsFound


def find_hosts(env: Mapping[str, str], nodefile: str | None) -> HostsFound:
    """The hosts by LSF's variables, of which LSB_MCPU_HOSTS has slots: `host count host count …`."""
    words = env.get("LSB_MCPU_HOSTS", "").split()
    if nodefile is None and words and len(words) % 2 == 0:
        pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
        return count_hosts(pairs), "LSB_MCPU_HOSTS"
    hosts, source = read_named_file(env, "LSB_DJOB_HOSTFILE", nodefile)
    if hosts is None and env.get("LSB_HOSTS"):
        hosts, source = count_hosts([[h] for h in env["LSB_HOSTS"].split()]), "LSB_HOSTS"
    return hosts, source


SCHEDULER = Scheduler(
    name="lsf",
    title="LSF",
    order=40,
    directives=Directives(array_first=1),
    variables=Variables(prefixes=("LSB_",), job_id=("LSB_JOBID",), array_index=("LSB_JOBINDEX",)),  # 0 without an array
    commands=Commands(of_index="{job}[{index}]"),
    find_hosts=find_hosts,
)
