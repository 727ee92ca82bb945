"""LSF: its allocations are read; hpcddp writes no job scripts for it."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import Allocation, count_hosts, read_named_file
from hpcddp.schedulers.row import Scheduler, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_job(env: Mapping[str, str], nodefile: str | None) -> Allocation | None:
    """The job by LSF's variables, of which LSB_MCPU_HOSTS has slots: `host count host count …`."""
    if "LSB_JOBID" not in env:
        return None
    index = env.get("LSB_JOBINDEX", "0")
    job = env["LSB_JOBID"] + ("" if index in {"", "0"} else f"[{index}]")
    words = env.get("LSB_MCPU_HOSTS", "").split()
    if nodefile is None and words and len(words) % 2 == 0:
        pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
        return Allocation("lsf", job, count_hosts(pairs), "LSB_MCPU_HOSTS")
    hosts, source = read_named_file(env, "LSB_DJOB_HOSTFILE", nodefile)
    if hosts is None and env.get("LSB_HOSTS"):
        hosts, source = count_hosts([[h] for h in env["LSB_HOSTS"].split()]), "LSB_HOSTS"
    return Allocation("lsf", job, hosts, source)


SCHEDULER = Scheduler(
    name="lsf",
    title="LSF",
    order=40,
    variables=Variables(prefixes=("LSB_",), job_id="LSB_JOBID"),
    find_job=find_job,
)
