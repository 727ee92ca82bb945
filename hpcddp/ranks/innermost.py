"""Which of several launchers started this process: the innermost one.

Launchers nest (mpirun starts its daemons with srun; srun starts torchrun), and each leaves its row. Live evidence
decides where it can be read. A recorded environment is decided by what a launcher inside another one must look like;
where nothing decides, the answer is a refusal that shows both.
"""

from __future__ import annotations

from itertools import pairwise

from hpcddp.errors import LaunchError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.units import read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.candidates import Candidate


class JudgedCandidate(Record):
    """What became of one candidate, and why. For `hpcddp env --explain`."""

    candidate: Candidate
    chosen: bool
    why: str


class Evidence(Record):
    """What the running process shows about its parents; empty for a recorded environment."""

    nearest: frozenset[str] = frozenset()  # keys of the rows that the nearest launcher among the parents can have set
    parent: str = ""  # that parent, for people: "prterun, pid 4711"
    seen: frozenset[str] = frozenset()  # keys of the rows that any parent can have set
    pmi_open: bool | None = None  # whether PMI_FD is an open socket
    shell_of: str = ""  # key of the row whose daemon started this process, or a parent, as a shell and not as a task


NO_EVIDENCE = Evidence()


def choose(
    candidates: list[Candidate], env: Mapping[str, str], evidence: Evidence = NO_EVIDENCE
) -> list[JudgedCandidate]:
    """Each candidate, judged; exactly one is chosen.

    LaunchError if nothing decides, if N processes would each be alone, or if the row is a leftover of a launch outside.
    """
    left, judged = _merge(candidates)
    inner, why = left[0], "the only launcher here"
    if len(left) > 1:
        inner, why = _by_evidence(left, evidence) or _by_command(left, env) or _by_rule(left, env)
    row = inner.row
    in_step = any(LAUNCHERS[key].step is not None for key in evidence.nearest)
    if row.programs_seen and in_step and inner.key not in evidence.seen:
        numbers = filter(None, (row.rank, row.world_size, row.local_rank, row.local_world_size))
        raise LaunchError(
            f"{inner.describe()} is a leftover of another launch: this process was started by {evidence.parent}",
            f"unset {' '.join(numbers)} before submitting, or, to use it: export HPCDDP_LAUNCHER={inner.row.name}",
        )
    for other in left:
        if other is not inner:
            _refuse_singletons(inner, other, env)
            judged.append(JudgedCandidate(other, False, f"outside: {inner.row.name} was started inside it"))
    return [JudgedCandidate(inner, True, why), *judged]


def without_leftovers(candidates: list[Candidate], env: Mapping[str, str], evidence: Evidence) -> list[Candidate]:
    """`candidates` without what a job inherits when it is submitted from inside a step of another job.

    Its batch shell then has the other step's variables, and those of PMI, and looks like a task by them.
    """
    if not evidence.shell_of:
        return candidates
    step = LAUNCHERS[evidence.shell_of].step
    stale = {"pmi": evidence.pmi_open is False, "pmix": step is not None and step.serves_pmix(env)}
    return [c for c in candidates if c.key != evidence.shell_of and not stale.get(c.row.protocol)]


def _merge(candidates: list[Candidate]) -> tuple[list[Candidate], list[JudgedCandidate]]:
    """Drop the rows that another launcher sets as well, and the bare protocol rows next to a whole launcher."""
    left = list(candidates)
    judged = []

    def drop(other: Candidate, why: str) -> None:
        left.remove(other)
        judged.append(JudgedCandidate(other, False, why))

    for speaker in candidates:
        for other in [c for c in left if c.key in speaker.row.speaks]:
            if other.numbers["rank"] == speaker.numbers["rank"] and other.size in (None, speaker.size):
                drop(other, f"the same launch: {speaker.row.name} sets these too")
    for other in [c for c in left if c.row.yields]:
        if len(left) > 1:  # what was set by hand is compared with the chosen launcher by `consistency`
            drop(other, other.row.yields)
    return left, judged


def _by_evidence(left: list[Candidate], evidence: Evidence) -> tuple[Candidate, str] | None:
    near = [c for c in left if c.key in evidence.nearest]
    if len(near) == 1:
        return near[0], f"its program is the nearest parent ({evidence.parent})"
    pmi = [c for c in left if c.row.pmi_socket]
    # a launcher that speaks the protocol too may have opened the socket
    if evidence.pmi_open is True and len(pmi) == 1 and not any("pmi" in c.row.speaks for c in left):
        return pmi[0], "its PMI socket is open"
    if evidence.pmi_open is False and len(left) - len(pmi) == 1:
        return next(c for c in left if c not in pmi), "the only one left: the PMI socket of the other is dead"
    return None


def _by_command(left: list[Candidate], env: Mapping[str, str]) -> tuple[Candidate, str] | None:
    """A launcher that writes down the command that it started: if that is another launcher, that one is inside."""
    for outer in left:
        variable = outer.row.command_variable
        command = env.get(variable, "").rpartition("/")[2]
        others = [c for c in left if c is not outer] if command else []
        inside = [c for c in others if command in (*c.row.programs, c.row.command.partition(" ")[0])]
        if len(inside) == 1:
            return inside[0], f"{outer.row.name} started it ({variable} is {command})"
    return None


def _by_rule(left: list[Candidate], env: Mapping[str, str]) -> tuple[Candidate, str]:
    """The deepest launcher, if each next one looks like what it was started by."""
    depths = sorted({c.row.depth for c in left}, reverse=True)
    levels = [_one_of_a_kind([c for c in left if c.row.depth == depth]) for depth in depths]
    for inner, outer in pairwise(levels):
        if inner.row.daemon_variables and outer.row.step is not None and outer.row.step.serves_pmix(env):
            return outer, f"PMIX_NAMESPACE is {outer.row.name}'s, so {outer.row.name} came after {inner.row.name}"
        if not _could_start(outer, inner, env):
            _refuse_singletons(inner, outer, env)
            raise _undecided(inner, outer)
    return levels[0], "the innermost: the others only started its daemons"


def _one_of_a_kind(same_depth: list[Candidate]) -> Candidate:
    """Of two launchers of one depth, the one with several processes: around it, the other is right to say 1."""
    several = [c for c in same_depth if c.size != 1] or same_depth[:1]
    if len(several) > 1:
        raise _undecided(several[0], several[1])
    return several[0]


def _could_start(outer: Candidate, inner: Candidate, env: Mapping[str, str]) -> bool:
    """Whether `outer`'s processes look like the daemons or agents from which `inner` started its ranks."""
    if outer.size == 1:
        return True
    if inner.row.is_agent:  # its agents are the outer launcher's ranks
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
