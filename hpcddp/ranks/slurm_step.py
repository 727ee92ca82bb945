"""Slurm's steps: which process is a task of one, and what its variables say and do not say.

Slurm sets SLURM_PROCID and others in batch scripts and shells too, and a job that is submitted from a task inherits the
task's.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.processes import read_argv
from hpcddp.ranks.consistency import contradiction
from hpcddp.ranks.launcher import JobStep
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import expand_counts, expand_nodelist, same_host
from hpcddp.units import read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.candidates import Candidate
    from hpcddp.ranks.launcher import RankInfo

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # ids from here on are Slurm's own: batch (…fb), extern (…fc), interactive (…fa)


def _is_task(env: Mapping[str, str]) -> bool:
    """Whether Slurm started this process as a task of a step.

    Not so in a batch script (no step id; -5 from Slurm 26.05), in an interactive step (4294967290), and in salloc's
    older shell: a step of one task that was is_listed to keep the job's SLURM_NTASKS (`srun --preserve-env --pty`).
    Sources: Slurm src/common/env.c, slurm_protocol_defs.h.
    """
    step = env.get("SLURM_STEP_ID", "")
    number = read_number(step)
    if number is None or number >= _FIRST_SPECIAL_STEP:
        return False
    return env.get("SLURM_STEP_NUM_TASKS") != "1" or (read_number(env.get("SLURM_NTASKS", "1")) or 1) == 1


def _check(chosen: Candidate, env: Mapping[str, str], hostname: str | None) -> None:
    """LaunchError if the step's own variables disagree: tasks, nodes, or the place of this host among them."""
    counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"], "SLURM_STEP_TASKS_PER_NODE")
    if sum(counts) != chosen.size:
        raise contradiction(chosen, "world_size", f"SLURM_STEP_TASKS_PER_NODE adds up to {sum(counts)}")
    if len(counts) != chosen.numbers["num_nodes"]:
        raise contradiction(chosen, "num_nodes", f"SLURM_STEP_TASKS_PER_NODE is for {len(counts)}")
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    hosts = expand_nodelist(nodelist, "SLURM_STEP_NODELIST") if nodelist else []
    if not hosts:
        return
    if len(hosts) != len(counts):
        raise contradiction(chosen, "num_nodes", f"SLURM_STEP_NODELIST={shorten(nodelist)} holds {len(hosts)}")
    mine = hosts[int(env["SLURM_NODEID"])]
    if hostname is None or same_host(hostname, mine):
        return
    # Slurm may know a host by another name than its own; then its daemon says that name, and ours cannot be compared.
    daemon = env.get("SLURMD_NODENAME", "")
    if any(same_host(hostname, host) for host in hosts) or not any(same_host(daemon, host) for host in hosts):
        raise LaunchError(
            f"this host is {hostname}, but SLURM_NODEID={env['SLURM_NODEID']} is {mine} in "
            f"SLURM_STEP_NODELIST={shorten(nodelist)}",
            "start the program with srun; the SLURM_ variables here are another host's",
        )


def _find_rank_0(env: Mapping[str, str], info: RankInfo) -> tuple[str | None, str]:
    """The step's first host if rank 0 is there. With --distribution=arbitrary it may be anywhere: SLURM_GTIDS lists
    this node's.

    All ranks must come to one answer: with arbitrary placement over more than two nodes most cannot know, so all say
    None.
    """
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    hosts = expand_nodelist(nodelist, "SLURM_STEP_NODELIST") if nodelist else []
    node = info.node_rank
    if node is None or node >= len(hosts):
        return None, ""
    ranks_here = env.get("SLURM_GTIDS", "").split(",")
    zero_here = info.rank == 0 or "0" in ranks_here
    is_listed = zero_here or len(ranks_here) == info.local_world_size
    by_hand = env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or (is_listed and zero_here != (node == 0))
    if not by_hand:
        return hosts[0], "SLURM_STEP_NODELIST (first host)"
    if len(hosts) > 2 or not is_listed:
        return None, ""
    return hosts[node if zero_here else 1 - node], "SLURM_STEP_NODELIST (by SLURM_GTIDS)"


def _find_shell(daemon: int) -> str:
    """`4711.batch` where this slurmstepd runs a shell and no task of a step; else, and where its title is hidden, "".

    It names itself `slurmstepd: [4711.batch]`, `[4711.interactive]`, and for tasks `[4711.0]` (seen with Slurm 22.05).
    """
    step = " ".join(read_argv(daemon)).partition("[")[2].partition("]")[0]
    return step if step.rpartition(".")[2] in {"batch", "interactive", "extern"} else ""


SLURM_STEP = JobStep(
    is_task=_is_task,
    is_shell_in_task=lambda env: "SLURM_PTY_PORT" in env,
    serves_pmix=lambda env: env.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."),
    check=_check,
    find_rank_0=_find_rank_0,
    find_shell=_find_shell,
)
