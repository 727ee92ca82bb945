"""Finds a process's rank in its environment: `find_rank(launch) -> FoundRank`; `require_info` makes a RankInfo of it.

The order: a pin by HPCDDP_LAUNCHER, else the innermost launcher's row, else plain RANK and WORLD_SIZE, else, where
neither a launcher nor a scheduler shows, a single process. There is no default that lies: no rank 0 of 1 where
anything shows more.
"""

from __future__ import annotations

import os
from itertools import pairwise

from hpcddp.errors import LaunchError, nearest
from hpcddp.processes import read_argv, read_stat
from hpcddp.ranks import consistency
from hpcddp.ranks.candidates import find_candidates, read_row, stands
from hpcddp.ranks.launcher import NUMBERS, Candidate, RankInfo
from hpcddp.ranks.launchers import LAUNCHER_NAMES, LAUNCHERS, launchers_under
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.launch import Launch
    from hpcddp.schedulers.allocation import Allocation


# ---- which of several launchers started this process: the innermost one


class Evidence(Record):
    """Evidence of a running process on its parents; empty for a recorded environment."""

    nearest: frozenset[str] = frozenset()  # keys of the rows that the nearest launcher among the parents can have set
    parent: str = ""  # that parent, for people: "prterun, pid 4711"
    ancestors: frozenset[str] = frozenset()  # keys of the rows that any parent can have set
    shell_of: str = ""  # key of the row whose daemon started this process, or a parent, as a shell and not as a task


def choose(
    candidates: list[Candidate], env: Mapping[str, str], evidence: Evidence
) -> tuple[Candidate, list[Candidate]]:
    """The launcher that started this process, and those outside of it.

    LaunchError if nothing decides, if N processes would each be alone, or if the row is a leftover of a launch outside.
    """
    left = _merge(candidates)
    inner = left[0]
    if len(left) > 1:
        near = [c for c in left if c.key in evidence.nearest]
        inner = near[0] if len(near) == 1 else _by_command(left, env) or _by_rule(left, env)
    row = inner.row
    in_step = any(LAUNCHERS[key].step is not None for key in evidence.nearest)
    if row.programs_verified and in_step and inner.key not in evidence.ancestors:
        numbers = filter(None, (row.rank, row.world_size, row.local_rank, row.local_world_size))
        raise LaunchError(
            f"{inner.describe()} is a leftover of another launch: this process was started by {evidence.parent}",
            f"unset {' '.join(numbers)} before submitting, or, to use it: export HPCDDP_LAUNCHER={inner.row.name}",
        )
    outside = [other for other in left if other is not inner]
    for other in outside:
        _refuse_singletons(inner, other, env)
    return inner, outside


def _merge(candidates: list[Candidate]) -> list[Candidate]:
    """Drop rows that another launcher sets as well, and bare protocol rows next to a whole launcher."""
    left = list(candidates)
    for speaker in candidates:
        for other in [c for c in left if c.key in speaker.row.speaks]:
            if other.numbers["rank"] == speaker.numbers["rank"] and other.size in (None, speaker.size):
                left.remove(other)
    # what was set by hand is compared with the chosen launcher by `consistency`
    return [c for c in left if not c.row.yields] or left[-1:]


def _by_command(left: list[Candidate], env: Mapping[str, str]) -> Candidate | None:
    """The inner launcher, where the outer one has a variable with the command that it started, and that command is the
    inner one's (mpirun starts torchrun)."""
    for outer in left:
        command = env.get(outer.row.command_variable, "").rpartition("/")[2]
        others = [c for c in left if c is not outer] if command else []
        inside = [c for c in others if command in (*c.row.programs, c.row.command.partition(" ")[0])]
        if len(inside) == 1:
            return inside[0]
    return None


def _by_rule(left: list[Candidate], env: Mapping[str, str]) -> Candidate:
    """The deepest launcher, if each next one looks like what it was started by."""
    depths = sorted({c.row.depth for c in left}, reverse=True)
    levels = [_one_of_a_kind([c for c in left if c.row.depth == depth]) for depth in depths]
    for inner, outer in pairwise(levels):
        if inner.row.daemon_variables and outer.row.step is not None and outer.row.step.serves_pmix(env):
            return outer  # PMIX_NAMESPACE is its own, so that it came later
        if not _could_start(outer, inner, env):
            _refuse_singletons(inner, outer, env)
            raise _undecided(inner, outer)
    return levels[0]


def _one_of_a_kind(same_depth: list[Candidate]) -> Candidate:
    """Choose, of two launchers of one depth, the one with several processes: the other is right to say 1 around it."""
    several = [c for c in same_depth if c.size != 1] or same_depth[:1]
    if len(several) > 1:
        raise _undecided(several[0], several[1])
    return several[0]


def _could_start(outer: Candidate, inner: Candidate, env: Mapping[str, str]) -> bool:
    """Whether `outer`'s processes look like the daemons or agents from which `inner` started its ranks."""
    if outer.size == 1:
        return True
    if inner.row.is_node_agent:  # its agents are the outer launcher's ranks
        return inner.numbers["num_nodes"] in (None, outer.size)
    if outer.row.step is not None and outer.row.step.is_shell_in_task(env):  # and mpirun was typed there
        return True
    if _daemon_number(inner, env) == 0:  # mpirun itself, not a daemon of it, is an outer task
        return False
    return outer.numbers["local_world_size"] == 1  # one daemon per node


def _refuse_singletons(inner: Candidate, outer: Candidate, env: Mapping[str, str]) -> None:
    """N processes that would each be alone: the failure that nobody notices until the bill comes."""
    if inner.size != 1 or outer.size in (None, 1):
        return
    if (_daemon_number(inner, env) or 0) > 0 and outer.numbers["local_world_size"] == 1:
        return  # Open MPI starts a daemon on every node of the job, even for one rank
    raise LaunchError(
        f"{outer.size} processes were started ({outer.describe()}), but each is alone ({inner.describe()})",
        f"start the program once, with one launcher; if 1 process is what you want: HPCDDP_LAUNCHER={inner.row.name}",
    )


def _daemon_number(inner: Candidate, env: Mapping[str, str]) -> int | None:
    """Which daemon of `inner` started this process: 0 is mpirun itself. None where the launcher does not say."""
    for name in inner.row.daemon_variables:
        number = read_number(env.get(name, "").partition(";")[0].rpartition(".")[2])
        if number is not None:
            return number
    return None


def _undecided(a: Candidate, b: Candidate) -> LaunchError:
    return LaunchError(
        f"two launchers say different things, and nothing shows which is inside: {a.describe()}; {b.describe()}",
        f"say which one counts: HPCDDP_LAUNCHER={a.row.name} or HPCDDP_LAUNCHER={b.row.name}",
    )


# ---- the rank


class FoundRank(Record):
    """The rank of a process, as far as its environment shows it.

    `remarks` name the launchers outside of the one that started this process, for people. `numbers` may lack the world
    size (PALS without its file, `mpiexec -pmi-port`): `require_info` insists on it, `hpcddp env` does not.
    """

    launcher: str
    numbers: Mapping[str, int | None]
    source: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    def info(self) -> RankInfo | None:
        """Convert it to a RankInfo; None if rank or world size is unknown."""
        rank, size, *others = (self.numbers[k] for k in NUMBERS)
        if rank is None or size is None:
            return None
        local_rank, local_world_size, node_rank, num_nodes = others
        return RankInfo(self.launcher, rank, size, local_rank, local_world_size, node_rank, num_nodes, self.source)


def require_info(place: FoundRank) -> RankInfo:
    """The place as RankInfo. LaunchError if the world size is unknown."""
    info = place.info()
    if info is None:
        raise LaunchError(
            f"{place.launcher} says rank {place.numbers['rank']} ({place.source['rank']}), but not of how many",
            LAUNCHERS[place.launcher].without_size or f"start it with {place.launcher}",
        )
    return info


def find_rank(launch: Launch) -> FoundRank:
    """Find this process's rank. LaunchError if it was not launched as one, or if the environment contradicts itself.

    The parents of this process are evidence of a live launch.
    """
    env = launch.env
    pin = env.get("HPCDDP_LAUNCHER", "")
    if pin == "none":
        return _single("HPCDDP_LAUNCHER=none")
    outside: list[Candidate] = []
    if pin:
        chosen = _pinned(pin, env)
    else:
        found = find_candidates(env)
        evidence = gather_evidence() if launch.live and found else Evidence()
        if evidence.shell_of:  # a job that is submitted from inside a step inherits its variables, and those of PMI
            found = [c for c in found if c.key != evidence.shell_of and not c.row.protocol]
        if not found:
            if launch.allocation is not None:
                raise not_launched(launch.allocation, env)
            _refuse_stray(env)
            return _single("no launcher and no allocation in the environment")
        chosen, outside = choose(found, env, evidence)
    _check(chosen, env, pinned=bool(pin))
    if chosen.row.step is not None:  # a step may be smaller than its job, so the step's hosts count
        chosen.row.step.check(chosen, env, launch.hostname)
    elif launch.allocation is not None:
        _check_allocation(chosen, launch, launch.allocation, pinned=bool(pin))
    numbers, source = _derive(chosen)
    name = chosen.row.name
    remarks = (f"{other.describe()} is outside: {name} was started inside it" for other in outside)
    return FoundRank(name, numbers, source, tuple(remarks))


def _check(chosen: Candidate, env: Mapping[str, str], *, pinned: bool) -> None:
    row = chosen.row
    if row.protocol and not row.world_size:
        raise LaunchError(
            f"{row.rank}={env[row.rank]} shows that a launcher started this process, but nothing says of how many",
            row.without_size,
        )
    consistency.check_bounds(chosen)
    if not pinned:
        consistency.check_agent_store(env, LAUNCHERS.values())
        if row.rank != LAUNCHERS["env"].rank:  # else they are the row's own
            consistency.check_torch_variables(chosen, env, LAUNCHERS["env"])


def _check_allocation(chosen: Candidate, launch: Launch, allocation: Allocation, *, pinned: bool) -> None:
    consistency.check_host(chosen, launch.env, launch.hostname, allocation)
    row = chosen.row
    if row.by_hand and chosen.size == 1 and (allocation.slots or 0) > 1 and not pinned:
        raise LaunchError(
            f"{row.world_size}=1, but {allocation.source} has {allocation.slots} slots and no launcher started this"
            " process",
            f"{command(allocation, launch.env)}; if 1 process is what you want: HPCDDP_LAUNCHER={row.name}",
        )


def _pinned(pin: str, env: Mapping[str, str]) -> Candidate:
    if pin not in LAUNCHER_NAMES:
        raise LaunchError(
            f"HPCDDP_LAUNCHER={pin!r} is not a launcher{nearest(pin, list(LAUNCHER_NAMES))}",
            f"one of: {' '.join(LAUNCHER_NAMES)}",
        )
    for key, row in LAUNCHERS.items():
        if row.name == pin and stands(row, env):
            return read_row(key, env)
    row = LAUNCHERS[pin]
    found = [r.name for r in LAUNCHERS.values() if r.name in LAUNCHER_NAMES and stands(r, env)]
    why = f"there is no {row.rank} of its own (found: {', '.join(found) or 'no launcher'})"
    if row.step is not None and row.rank in env:
        why = f"this is not a task of a step ({row.marks[0]} is {env.get(row.marks[0], 'not set')})"
    raise LaunchError(f"HPCDDP_LAUNCHER={pin}, but {why}", f"unset HPCDDP_LAUNCHER, or start the program with {pin}")


def _refuse_stray(env: Mapping[str, str]) -> None:
    """Part of a launcher's row, not enough to tell which: still proof that this is no single process."""
    for row in LAUNCHERS.values():
        numbers = (row.rank, row.world_size, row.local_rank, row.local_world_size)
        names = [n for n in (numbers if row.stray is None else row.stray) if n]
        if row.by_hand and (read_number(env.get(row.local_rank, "")) or 0) < 1:
            names = names[:2]  # people export a local rank of 0 for a single process; no single process has another
        there = [name for name in names if name in env]
        if there:
            raise LaunchError(
                f"half a row from {row.name}: {', '.join(f'{v}={env[v]}' for v in there)}, "
                f"but {' and '.join(name for name in names if name not in env)} not set",
                f"unset {' '.join(there)} if it is a leftover, else start the program with its launcher",
            )


def not_launched(allocation: Allocation, env: Mapping[str, str]) -> LaunchError:
    """The error for a shell or script that a scheduler started and no launcher did."""
    where = "an interactive shell" if allocation.interactive else "a batch script or shell"
    empty = f", and {allocation.source} is empty" if allocation.hosts == () else ""
    return LaunchError(
        f"not launched: this is {where} of {allocation.scheduler} job {allocation.job_id or '(no id)'}, "
        f"and no launcher started this process as a rank{empty}",
        command(allocation, env),
    )


def command(allocation: Allocation, env: Mapping[str, str]) -> str:
    """The command that starts ranks in this allocation."""
    return f"{launch_line(allocation, env)} hpcddp exec -- COMMAND   (or: hpcddp launch -- COMMAND)"


def launch_line(allocation: Allocation, env: Mapping[str, str]) -> str:
    """The launcher's words for the ranks that this allocation was requested for."""
    scheduler = find_scheduler(allocation.scheduler)
    row = LAUNCHERS[launchers_under(scheduler.name)[0]]
    ranks = scheduler.count_ranks(allocation.slots, env)
    if not ranks and row.of_scheduler:
        return row.program  # it asks the scheduler
    return row.command.format(n=ranks or "N")


def _single(why: str) -> FoundRank:
    numbers = dict(zip(NUMBERS, (0, 1, 0, 1, 0, 1), strict=True))
    return FoundRank("none", numbers, dict.fromkeys(("launcher", *NUMBERS), why))


def _derive(chosen: Candidate) -> tuple[dict[str, int | None], dict[str, str]]:
    """Add what is certain: one node means node 0 of 1, and an only rank is alone on its node. Nothing else follows."""
    n, source = dict(chosen.numbers), {"launcher": chosen.source["rank"], **chosen.source}

    def conclude(number: str, value: int, because: str) -> None:
        if n[number] is None:
            n[number], source[number] = value, because

    if n["world_size"] == 1:
        for number, value in (("local_rank", 0), ("local_world_size", 1)):
            conclude(number, value, f"{source['world_size']} (the only rank)")
    if n["num_nodes"] == 1 and n["world_size"] is not None:
        conclude("local_world_size", n["world_size"], f"{source['num_nodes']} (one node)")
    if n["local_world_size"] is not None and n["local_world_size"] == n["world_size"]:
        because = f"{source['local_world_size']} = {source['world_size']} (all ranks are on this node)"
        conclude("node_rank", 0, because)
        conclude("num_nodes", 1, because)
    return n, source


# ---- this process's parents


def gather_evidence() -> Evidence:
    """Find what /proc shows about this very process."""
    chain = parents()
    evidence = weigh_parents(chain)
    for key in evidence.nearest:
        row = LAUNCHERS[key]
        daemon = next(pid for pid, name in chain if name in row.programs)
        if row.step is not None and row.step.find_shell(daemon):
            return evidence._replace(shell_of=key)
    return evidence


def weigh_parents(chain: list[tuple[int, str]]) -> Evidence:
    """The evidence in a chain of parents, (pid, command name) nearest first."""
    keys = [frozenset(key for key, row in LAUNCHERS.items() if name in row.programs) for _, name in chain]
    at = next((at for at, found in enumerate(keys) if found), None)
    if at is None:
        return Evidence()
    pid, name = chain[at]
    return Evidence(keys[at], f"{name}, pid {pid}", frozenset().union(*keys))


def launcher_pid() -> int | None:
    """The process that started the ranks of this node: the nearest launcher among the parents."""
    programs = {program for row in LAUNCHERS.values() for program in row.programs}
    return next((pid for pid, name in parents() if name in programs), None)


def launcher_option(programs: tuple[str, ...], option: str) -> str:
    """The value of an option of the nearest of these programs among the parents; "" where it cannot be seen."""
    words = next((read_argv(pid) for pid, name in parents() if name in programs), [])
    return words[words.index(option) + 1] if option in words[:-1] else ""


def parents() -> list[tuple[int, str]]:
    """(pid, command name) of this process's ancestors, nearest first, as far as /proc shows them."""
    chain: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 0 and len(chain) < 64 and (stat := read_stat(pid)) is not None:
        chain.append((pid, stat.name))
        pid = stat.parent
    return chain
