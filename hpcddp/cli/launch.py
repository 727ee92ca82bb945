"""`hpcddp launch -- command …`: run a command on every rank of the allocation this shell is in.

It is `render` and `bash` in one, with nodes and ranks taken from the allocation instead of a request: the script is the
one that `render` would print, so a run started by hand leaves the same run folder as a batch job.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import add_options, listed, read_given
from hpcddp.cli.streams import print_message, print_messages, write_exactly
from hpcddp.errors import LaunchError, RequestError, SchedulerError, find_missing_library
from hpcddp.login.planning import detect_spawn, on_path, read_spec_here, remark_start, this_process
from hpcddp.ranks.candidates import find_candidates
from hpcddp.ranks.device import count_visible_gpus
from hpcddp.ranks.launch_commands import launcher_of_version
from hpcddp.ranks.launcher import Launcher
from hpcddp.ranks.launchers import LAUNCHERS, NODE_AGENTS, launchers_under
from hpcddp.ranks.resolve import launch_line
from hpcddp.record import Record
from hpcddp.runs.start import make_stamp
from hpcddp.schedulers.allocation import Allocation, expand_counts
from hpcddp.schedulers.registry import find_allocation, find_scheduler, scripted_schedulers, submit_commands
from hpcddp.schedulers.run import ask_job, run_program
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.node_agents import plan_rank_maker
from hpcddp.script.plan import find_script, plan_job, remark_name
from hpcddp.script.recover import RECOVERY_KEYS
from hpcddp.script.render import render_script
from hpcddp.script.site import Account, Site
from hpcddp.script.site_file import SiteChoice, open_site
from hpcddp.units import format_count, parse_count, read_number

_DESCRIPTION = """\
Run a command on every rank of the allocation this shell is in (qsub -I, salloc, or inside a batch script).

The exit status is the launcher's, which is the command's."""
_OF_ALLOCATION = "nodes, queue and account are the allocation's"
# What --set takes: other keys of a job file are options here, or are for a job that is queued.
_SETTABLE = ("ranks", "max_micro_batch", "independent", "preflight", "notify", *RECOVERY_KEYS)


class AllocationSize(Record):
    """Size of an allocation: nodes, and of each node the slots that the scheduler gave, CPUs and GPUs."""

    nodes: int
    slots: int
    cpus: int
    gpus: int


def find_size(allocation: Allocation | None, env: Mapping[str, str]) -> AllocationSize:
    """LaunchError if the job does not say its hosts, or has other numbers of slots on them."""
    gpus = count_visible_gpus(env)
    cpus = len(os.sched_getaffinity(0))
    if allocation is None:
        return AllocationSize(1, 1, cpus, gpus)
    if allocation.hosts is None:
        raise LaunchError(
            f"{allocation.scheduler} job {allocation.job_id} does not say on which hosts it runs",
            "run `hpcddp launch` in the job's own shell, where its variables are set",
        )
    counts = {slots for _, slots in allocation.hosts}
    if len(counts) > 1:
        what = f"the allocation has {min(counts)} to {max(counts)} slots per host ({allocation.source})"
        raise LaunchError(what, "ask for the same number on every node")
    variables = find_scheduler(allocation.scheduler).variables
    each = env.get(variables.cpus_of_nodes, "")
    given = min(expand_counts(each, variables.cpus_of_nodes)) if each else None
    cpus = read_number(env.get(variables.cpus, "")) or given or cpus
    return AllocationSize(len(allocation.hosts), counts.pop(), cpus, gpus)


def build_parser() -> VerbParser:
    parser = VerbParser(
        "launch",
        _DESCRIPTION,
        example="hpcddp launch -- python train.py\nhpcddp launch --here --ranks-per-node 2 -- python train.py",
        exits=(2, 3, 4),
        also={85: "training stopped in time: unfinished"},
        takes_command=True,
    )
    parser.usage = "hpcddp launch [options] -- command [argument ...]"
    parser.elsewhere = dict.fromkeys(("--nodes", "--queue", "--account"), _OF_ALLOCATION) | dict.fromkeys(
        ("--gpus-per-node", "--cpus-per-rank"), "GPUs and CPUs are counted in the allocation"
    )
    add_options(parser, f"{listed(_SETTABLE)} of a job file, or env.NAME")
    group = parser.add_argument_group("how it is launched")
    group.add_argument("--here", action="store_true", help="run on this machine, although it has a scheduler")
    group.add_argument("--dry-run", action="store_true", help="print the script instead of running it")
    group.add_argument("--scratch", action="store_true", help="keep no run: for timing and trying")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Plan for what is here, render, and become the shell that runs it."""
    if not args.command:
        raise RequestError("there is no command to run", "hpcddp launch -- python train.py")
    for key in (item.partition("=")[0] for item in args.set):
        if key not in _SETTABLE and not key.startswith("env."):
            raise RequestError(
                f"--set {key}: hpcddp launch takes {listed((*_SETTABLE, 'env.NAME'))}",
                "leave it out, or use an option of its own: hpcddp launch --help",
            )
    _refuse_inside_a_rank(env)
    allocation = None if args.here else find_allocation(env)
    if allocation is None and not args.here:
        _refuse_outside_an_allocation(env)
    plan = plan_here(args, allocation, env)
    script = render_script(plan)
    if args.dry_run:
        print_messages(remark_start(plan))
        write_exactly(script)
        return 0
    _check_command(plan, env)
    size = f"{format_count(plan.world_size, 'rank')} on {format_count(plan.nodes, 'node')}"
    print_message(f"{size}, by {plan.makes_ranks}")
    # an allocation may see several launches, each an attempt of its own
    more = {"HPCDDP_LAUNCH": str(os.getpid())} if allocation is not None else {}
    # a file of its own: as one argument the script could be too long for the kernel
    file = tempfile.TemporaryFile()  # noqa: SIM115  # bash reads it
    file.write(os.fsencode(script))
    file.flush()
    os.set_inheritable(file.fileno(), True)
    argv = ["bash", f"/proc/self/fd/{file.fileno()}"]
    os.execvpe("bash", argv, {**env, **more})
    raise AssertionError("exec returned")  # it does not: it replaces this process or raises


def plan_here(args: argparse.Namespace, allocation: Allocation | None, env: Mapping[str, str]) -> JobPlan:
    """The plan of a launch in this allocation, or on this machine. The errors of `find_size` and `plan_job`."""
    site = _site(args.site, allocation, env)
    size = find_size(allocation, env)
    # One slot per node is what a scheduler gives when nobody asked: then each GPU gets its rank, or each few of them.
    each = 1 if args.gpus_per_rank is None else parse_count(args.gpus_per_rank, "--gpus-per-rank")
    ranks = size.slots if size.slots > 1 else max(size.gpus // each, 1)
    if args.ranks_per_node is not None:
        ranks = parse_count(args.ranks_per_node, "--ranks-per-node")
    keys: dict[str, tuple[object, str]] = {
        "nodes": (str(size.nodes), "the allocation"),
        "gpus_per_node": (str(size.gpus), "the visible devices"),
        "cpus_per_node": (str(max(size.cpus, ranks)), "this machine"),
        "workdir": (os.getcwd(), "the folder of this shell"),
        **read_given(args),
    }
    if args.scratch:
        keys["run_dir"] = (f"runs/.scratch-{make_stamp()}", "--scratch")
    if "spares" in keys:
        spares = parse_count(str(keys["spares"][0]), "--set spares")
        if spares >= size.nodes:
            what = f"--set spares={spares} of {format_count(size.nodes, 'node')} leaves none to train on"
            raise RequestError(what, "leave out spares")
        keys["nodes"] = (str(size.nodes - spares), "the allocation, without spares")
    if args.walltime is None:
        if site.walltime_s is None:
            keys["walltime"] = ("168:00:00", "the default of hpcddp launch")
        if allocation is not None and find_scheduler(allocation.scheduler).variables.end not in env:  # for the script
            if (left := _time_left(allocation, env)) is not None:
                keys["walltime"] = (f"{left}s", "what is left of the allocation")
            else:
                print_message("the end of this allocation is not known; --walltime TIME gives it")
    spec, remarks = detect_spawn(read_spec_here(keys, (), env))
    print_messages(remarks)
    spec, rank_maker = plan_rank_maker(spec)
    if not spec.launcher:
        found = _find_launcher(site, env)  # on one node a command that makes the ranks needs no agent
        spec = spec if rank_maker.maker and LAUNCHERS[found].is_node_agent else spec._replace(launcher=found)
    plan = plan_job(spec._replace(ranks_per_node=spec.ranks_per_node or ranks), site, this_process())
    # What this machine has was not asked for, and a program may leave it.
    asks = allocation is not None or each > 1
    plan = plan._replace(
        slots=None if allocation is None else size.slots,
        needs_gpus=asks,
        by_hand=allocation is not None,
        scratch=args.scratch,
    )
    if (renamed := remark_name(plan)) is not None:
        print_message(renamed)
    _refuse_another_dialect(plan.outer_launcher, plan.outer_program, site, env)
    return plan


def _check_command(plan: JobPlan, env: Mapping[str, str]) -> None:
    """RequestError for a command that cannot be started, before it has a run folder."""
    from hpcddp.script.file_check import check_program

    by_torch = [name for name in (plan.launcher, plan.outer_launcher) if name and LAUNCHERS[name].is_node_agent]
    missing = find_missing_library(f"hpcddp launch by {by_torch[0]}", "torch") if by_torch else None
    if missing is not None and plan.python == sys.executable:
        raise LaunchError(missing.message, f"{missing.hint}, or put an MPI on PATH")
    folder, script = os.getcwd(), find_script(plan.command)
    if script and not os.path.isabs(script) and not os.path.exists(script):  # other paths may be on the nodes alone
        raise RequestError(f"the command's script {script!r} is not in {folder}", "correct the path")
    print_messages(check_program(plan.command[0], folder, plan.python, env.get("PATH", "")))


def _refuse_inside_a_rank(env: Mapping[str, str]) -> None:
    inside = [c for c in find_candidates(env) if (c.size or 1) > 1]
    if inside:
        # Of nested launchers the innermost one made this rank. A launcher may set another row's variables as well.
        echoed = set[str]().union(*(c.row.speaks for c in inside))
        inner = max(inside, key=lambda c: (not c.row.by_hand and c.key not in echoed, c.row.depth))
        raise LaunchError(
            f"this process is a rank already ({inner.describe()}); each of them would start a launcher of its own",
            "use `hpcddp exec -- command` inside a rank, or `hpcddp launch` outside the launcher",
        )


def _refuse_outside_an_allocation(env: Mapping[str, str]) -> None:
    for program, scheduler in submit_commands():
        if on_path(program, env):
            ask = " ".join(scheduler.commands.interactive)
            here = "run on this machine alone: hpcddp launch --here -- command"
            raise LaunchError(
                f"this shell is in no allocation, and this machine has a scheduler ({program} is on PATH)",
                f"ask for nodes ({ask}), or {here}" if ask else here,
            )


def _site(named: str | None, allocation: Allocation | None, env: Mapping[str, str]) -> Site:
    """The site of the options, else the generic one of the allocation's scheduler. Nothing is queued: it needs no
    account, and the queues' limits are not about it."""
    usual = next(row.generic_site for row in scripted_schedulers() if row.this_machine)
    if allocation is not None:
        scheduler = find_scheduler(allocation.scheduler)
        usual = scheduler.generic_site
        if not usual or not scheduler.fits_allocation:
            raise LaunchError(
                f"hpcddp launch cannot start ranks in an allocation of {scheduler.title}",
                f"start the ranks yourself: {launch_line(allocation, env)} hpcddp exec -- command",
            )
    site = open_site(SiteChoice(named, "--site") if named else SiteChoice(usual, "the allocation"), env)
    if allocation is not None and site.scheduler != allocation.scheduler:
        raise RequestError(
            f"site {site.name} has {site.scheduler}, but this allocation is of {allocation.scheduler}",
            f"--site {usual}",
        )
    queues = {name: queue._replace(limits=()) for name, queue in site.queues.items()}
    return site._replace(account=Account(), queues=queues)


def _time_left(allocation: Allocation, env: Mapping[str, str]) -> int | None:
    """Seconds, by the scheduler's word; None where it does not say."""
    job = ask_job(allocation.scheduler, allocation.job_id, env) if allocation.job_id else None
    left = None if job is None or job.runs_until is None else job.runs_until - int(time.time())
    return left if left is not None and left > 0 else None


def _find_launcher(site: Site, env: Mapping[str, str]) -> str:
    """The scheduler's own launcher; else whatever mpirun is on PATH, by its own word; else an agent."""
    known = launchers_under(site.scheduler)
    if LAUNCHERS[known[0]].of_scheduler:
        return site.launcher.name
    rows = [LAUNCHERS[name] for name in known]
    mpirun = next((path for row in rows if (path := _search(row.program, site, env, row))), None)
    if mpirun is None:
        return NODE_AGENTS[0]
    launcher, answer = _launcher_of(mpirun, env)
    if launcher is None:
        names = [name for name in known if LAUNCHERS[name].version_words]
        raise LaunchError(
            f"{mpirun} --version names no known MPI: {answer!r}", f"say which it is: --launcher {listed(names)}"
        )
    return launcher


def _search(program: str, site: Site, env: Mapping[str, str], row: Launcher) -> str | None:
    """Find this program as the script will: the site's goes before the environment's, but for some launchers on this
    machine alone (templates/base.sh.j2, local.sh.j2)."""
    folders = [env.get("PATH", ""), os.path.dirname(sys.executable)]
    if find_scheduler(site.scheduler).this_machine and row.environment_first:
        folders.reverse()
    return on_path(program, {"PATH": ":".join(folders)})


def _launcher_of(mpirun: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Whose mpirun this is, by its own word, and that word."""
    try:
        answer = run_program([mpirun, "--version"], env)
    except SchedulerError as error:  # it is no scheduler's
        raise LaunchError(error.message, error.hint) from error
    text = answer.stdout or answer.stderr
    return launcher_of_version(text), text.partition("\n")[0]


def _refuse_another_dialect(launcher: str, program: str, site: Site, env: Mapping[str, str]) -> None:
    """Each MPI's mpirun has options of its own: another one would stop at the first, or read it otherwise. Modules that
    the script loads may bring the right one, which cannot be seen from here."""
    found = None
    if program and not site.modules.load:
        found = _search(program, site, env, LAUNCHERS[launcher])
    other, _ = _launcher_of(found, env) if found else (None, "")
    if other is not None and other != launcher:
        raise LaunchError(
            f"the script's line is for {launcher}, but {found} belongs to {other}, which takes other options",
            f"--launcher {other}, or put the folder of {launcher}'s {program} first on PATH",
        )
