"""From environment to place: `find_rank(env) -> FoundRank`, and `require_info` makes a RankInfo of it. See `Launch`.

The order: a pin by HPCDDP_LAUNCHER, else the innermost launcher's row, else plain RANK and WORLD_SIZE, else, where
neither a launcher nor a scheduler shows, a single process. There is no default that lies: no rank 0 of 1 where
anything shows more.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError, nearest
from hpcddp.ranks import consistency
from hpcddp.ranks.candidates import find_candidates, read_row, stands
from hpcddp.ranks.innermost import NO_EVIDENCE, JudgedCandidate, choose, without_leftovers
from hpcddp.ranks.launchers import LAUNCHER_NAMES, LAUNCHERS, launchers_under
from hpcddp.ranks.rankinfo import NUMBERS, RankInfo
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.allocation import Allocation, FindAllocation
    from hpcddp.ranks.candidates import Candidate
    from hpcddp.ranks.innermost import Evidence


class FoundRank(Record):
    """Where a process stands, as far as its environment tells.

    `judged` has every launcher that was considered: none for a single process without one.
    `numbers` may lack the world size (PALS without its file, `mpiexec -pmi-port`): `require_info` insists on it,
    `hpcddp env` does not.
    """

    launcher: str
    numbers: Mapping[str, int | None]
    source: Mapping[str, str]
    judged: list[JudgedCandidate]

    def info(self) -> RankInfo | None:
        """As RankInfo; None if rank or world size is not told."""
        rank, size, *others = (self.numbers[k] for k in NUMBERS)
        if rank is None or size is None:
            return None
        local_rank, local_world_size, node_rank, num_nodes = others
        return RankInfo(self.launcher, rank, size, local_rank, local_world_size, node_rank, num_nodes, self.source)


def require_info(place: FoundRank) -> RankInfo:
    """The place as RankInfo. LaunchError if the world size is not told."""
    info = place.info()
    if info is None:
        raise LaunchError(
            f"{place.launcher} says rank {place.numbers['rank']} ({place.source['rank']}), but not of how many",
            LAUNCHERS[place.launcher].without_size or f"start it with {place.launcher}",
        )
    return info


def find_rank(env: Mapping[str, str], *, hostname: str | None, live: bool, allocation: FindAllocation) -> FoundRank:
    """This process's place. LaunchError if it was not launched as a rank, or if the environment contradicts itself.

    `hostname` is this host's name if known. `allocation` returns what `find_allocation` finds.
    With `live` the environment must be this process's own: its parents and its PMI socket then serve as evidence.
    """
    pin = env.get("HPCDDP_LAUNCHER", "")
    if pin == "none":
        return _single("HPCDDP_LAUNCHER=none")
    if pin:
        judged = [JudgedCandidate(_pinned(pin, env), True, f"HPCDDP_LAUNCHER={pin}")]
    else:
        found = find_candidates(env)
        evidence = _evidence(env) if live and found else NO_EVIDENCE
        found = without_leftovers(found, env, evidence)
        if not found:
            given = allocation()
            if given is not None:
                raise not_launched(given, env)
            _refuse_stray(env)
            return _single("no launcher and no allocation in the environment")
        judged = choose(found, env, evidence)
    chosen = next(v.candidate for v in judged if v.chosen)
    _check(chosen, env, pinned=bool(pin))
    if chosen.row.step is not None:  # a step may be smaller than its job, so the step's hosts count
        chosen.row.step.check(chosen, env, hostname)
    else:
        _check_allocation(chosen, env, hostname, allocation(), pinned=bool(pin))
    numbers, source = _derive(chosen)
    return FoundRank(chosen.row.name, numbers, source, judged)


def _evidence(env: Mapping[str, str]) -> Evidence:
    from hpcddp.ranks.ancestry import gather_evidence  # a recorded environment has no parents to look at

    return gather_evidence(env)


def _check(chosen: Candidate, env: Mapping[str, str], *, pinned: bool) -> None:
    row = chosen.row
    if row.protocol and not row.world_size:
        raise LaunchError(
            f"{row.rank}={env[row.rank]} shows that a launcher started this process, but nothing says of how many",
            row.without_size,
        )
    consistency.check_bounds(chosen)
    consistency.check_echoes(chosen, env)
    if not pinned:
        consistency.check_agent_store(env, LAUNCHERS.values())
        if row.rank != LAUNCHERS["env"].rank:  # else they are the row's own
            consistency.check_torch_variables(chosen, env, LAUNCHERS["env"])


def _check_allocation(
    chosen: Candidate, env: Mapping[str, str], hostname: str | None, allocation: Allocation | None, *, pinned: bool
) -> None:
    if allocation is None:
        return
    consistency.check_host(chosen, env, hostname, allocation)
    row = chosen.row
    if row.by_hand and chosen.size == 1 and (allocation.slots or 0) > 1 and not pinned:
        raise LaunchError(
            f"{row.world_size}=1, but {allocation.source} has {allocation.slots} slots and no launcher started this"
            " process",
            f"{command(allocation, env)}; if 1 process is what you want: HPCDDP_LAUNCHER={row.name}",
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
        own = (row.rank, row.world_size, row.local_rank, row.local_world_size)
        names = [n for n in (own if row.stray is None else row.stray) if n]
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
    why = find_scheduler(allocation.scheduler).no_slots
    empty = f", and {allocation.source} is empty{f' ({why})' if why else ''}" if allocation.hosts == () else ""
    return LaunchError(
        f"not launched: this is {where} of {allocation.scheduler} job {allocation.job_id or '(no id)'}, "
        f"and no launcher started this process as a rank{empty}",
        command(allocation, env),
    )


def command(allocation: Allocation, env: Mapping[str, str]) -> str:
    """What to type in this allocation to get its ranks."""
    return f"{launch_line(allocation, env)} hpcddp exec -- COMMAND   (or: hpcddp launch -- COMMAND)"


def launch_line(allocation: Allocation, env: Mapping[str, str]) -> str:
    """What starts the ranks that this allocation was asked for."""
    scheduler = find_scheduler(allocation.scheduler)
    row = LAUNCHERS[scheduler.launcher or launchers_under(scheduler.name)[0]]
    ranks = scheduler.count_ranks(allocation.slots, env)
    if not ranks and row.of_scheduler:
        return row.program  # it asks the scheduler
    return row.command.format(n=ranks or "N")


def _single(why: str) -> FoundRank:
    numbers = dict(zip(NUMBERS, (0, 1, 0, 1, 0, 1), strict=True))
    return FoundRank("none", numbers, dict.fromkeys(("launcher", *NUMBERS), why), [])


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
