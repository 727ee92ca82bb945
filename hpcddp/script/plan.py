"""The decision: a request and a site become a JobPlan, every value that a template may print."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from hpcddp.errors import RequestError, SiteError, nearest
from hpcddp.ranks.launch_commands import find_launch_command, hint_instead_of
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS, NODE_AGENTS, launchers_under
from hpcddp.record import Record
from hpcddp.runs.folder import RUNS
from hpcddp.runs.settings import ACCEPT, KEEP
from hpcddp.schedulers.registry import find_scheduler, scripted_schedulers
from hpcddp.script.container import plan_container, plan_python
from hpcddp.script.jobplan import SOME_COMMAND, WARNING_SIGNAL, JobPlan, PlannedBy
from hpcddp.script.node_agents import plan_rank_maker
from hpcddp.script.recover import (
    check_placeholders,
    check_recovery_keys,
    plan_data_size,
    plan_fewer_nodes,
    remark_recovery,
)
from hpcddp.script.scheduler_options import (
    SchedulerOptions,
    directive_word,
    plan_directives,
    plan_scheduler_options,
    requested_options,
)
from hpcddp.script.site import Queue, Site, check_limits
from hpcddp.script.spec import JobSpec
from hpcddp.script.sweeping import name_run, plan_sweep
from hpcddp.supervisor.order import THEN
from hpcddp.units import format_count, format_walltime

__all__ = ["JobPlan", "PlannedBy", "plan_job", "remark_name"]

# Commands of a shell that are no programs, or do nothing as one: each rank would end at once.
_OF_SHELL = {".", "alias", "cd", "declare", "eval", "exec", "export", "for", "if", "module", "set", "source", "trap",
             "ulimit", "umask", "unset", "while", "{"}  # fmt: skip
_SEPARATOR = ":"  # of programs, in the command line of every launcher that is no agent
# Set by the script, the launchers and hpcddp exec: a value from the job would be lost, or break the ranks.
_RESERVED = {*(getattr(LAUNCHERS["env"], number) for number in NUMBERS), "MASTER_PORT"}
#: Variables of hpcddp that people set, for the ranks and what watches them.
SETTABLE = ("HPCDDP_LOG_TO", "HPCDDP_PROGRESS", "HPCDDP_WATCHDOG", "HPCDDP_WATCHDOG_END")
_RESERVED_PREFIXES = ("HPCDDP_", *(prefix for row in LAUNCHERS.values() for prefix in row.reserved_prefixes))
# Keys of a job file that need the supervisor.
_SUPERVISED = ("chain", "max_restarts", "preflight", "notify", "stage_in", "stage_dir", "fresh", "resume", "sweep")


# ---- queue, account, launcher and the site's own words


def plan_queue(spec: JobSpec, site: Site) -> str:
    """The queue asked for, else the site's default; "" where the site's queues are not known and the server decides."""
    queue = spec.queue or site.queue
    if site.queues and queue not in site.queues:
        known = list(site.queues)
        what = f"queue {queue!r} is not one of site {site.name}'s{nearest(queue, known)}"
        raise RequestError(what, f"--queue one of {', '.join(known)}")
    return directive_word(queue, "queue") if queue else ""


def check_gpu_chunks(spec: JobSpec, site: Site, queue: str, ranks: int, gpus: int) -> None:
    """RequestError for what a request of one chunk for each GPU cannot carry: `ranks` and `gpus` are a node's."""
    if not site.queues.get(queue, Queue()).gpu_chunks:
        return
    what = f"queue {queue} of site {site.name} deals out GPUs, each with its share of the node"
    if not gpus:
        raise RequestError(f"{what}, and 0 GPUs were asked for", "--gpus-per-node 1, or another --queue")
    if ranks > gpus:
        what += f": {ranks} ranks do not go on {format_count(gpus, 'GPU')}"
        raise RequestError(what, "leave out ranks_per_node")
    if spec.mem_gb:
        raise RequestError(f"{what}: mem_gb {spec.mem_gb} cannot be asked for", "leave out mem_gb")


def plan_account(spec: JobSpec, site: Site) -> tuple[str, str, tuple[str, ...]]:
    """The account asked for and the option that carries it ("" for none), and what to say about it."""
    rule = site.account
    option = rule.option or find_scheduler(site.scheduler).directives.account
    if spec.account is None:
        return "", "", (rule.without,) if rule.without else ()
    if option == "none":
        what = f"site {site.name} knows no accounts, but account {spec.account!r} was given"
        raise RequestError(what, "leave out --account")
    account = directive_word(spec.account, "account")
    if rule.pattern and not re.fullmatch(rule.pattern, account):
        raise RequestError(
            f"account {account!r} is none of site {site.name}: an account matches {rule.pattern}"
            f" ({site.source(rule.source)})",
            f"--account {rule.example or 'NAME'}",
        )
    if rule.command_line:
        submit = " ".join(find_scheduler(site.scheduler).commands.submit)
        return account, "", (f"the script cannot carry the account: submit it with {submit} {option} {account}",)
    return account, option, ()


def plan_launcher(spec: JobSpec, site: Site, nodes: int, by_command: str = "") -> tuple[str, str]:
    """The launcher that makes the ranks, and the outer one, which the script calls ("" for an agent on one node).

    `by_command`: the agent as which the command makes the ranks.
    """
    known = launchers_under(site.scheduler)
    launcher = spec.launcher or site.launcher.name
    if by_command and launcher in known:
        return by_command, "" if nodes == 1 else launcher
    if LAUNCHERS[launcher].is_node_agent:
        of_site = site.launcher.name
        return launcher, "" if nodes == 1 else of_site if of_site in known else known[0]
    if launcher not in known:
        what = f"launcher {launcher} does not work on site {site.name}, whose scheduler is {site.scheduler}"
        raise RequestError(what, f"--launcher one of {', '.join((*known, *NODE_AGENTS))}")
    return launcher, launcher


def plan_site_words(spec: JobSpec, site: Site) -> dict[str, str]:
    """The words that only this site asks for: what the job gives, else the site's default; without either, none."""
    given = spec.variables or {}
    for name in given:
        if name not in site.vars:
            known = ", ".join(site.vars) or "none"
            raise RequestError(f"site {site.name} has no key {name!r}", f"leave out {name}; its own keys: {known}")
    values = {}
    for name, rule in site.vars.items():
        value = given.get(name) or rule.default
        if value and not re.fullmatch(rule.pattern or r"[\w.+:,@=%/-]+", value, re.ASCII):
            what = f"{name} {value!r} is nothing that site {site.name} takes ({site.source(rule.source)})"
            raise RequestError(what, f"--set {name}={rule.example or rule.default or 'VALUE'}")
        if value:
            values[name] = value
    return values


# ---- missing values


class Missing(Record):
    """A value that is not given: its name in a sentence, the option that gives it and an example. `of_site`: site files
    usually have it."""

    what: str
    option: str
    example: str
    of_site: bool


def list_missing(spec: JobSpec, site: Site, cpus_known: bool) -> Iterator[Missing]:
    """Everything that is open but the command, in the order in which people think of it. `cpus_known`: the node is
    this machine."""
    queue = site.queues.get(spec.queue or site.queue, Queue())
    rule = site.account_of(spec.queue or site.queue)
    if spec.account is None and rule.required:
        yield Missing(f"an account ({site.source(rule.source)})", "--account", rule.example or "NAME", False)
    if not (spec.queue or site.queue) and site.queues:
        yield Missing(f"a queue (one of {', '.join(site.queues)})", "--queue", next(iter(site.queues)), False)
    rules = () if spec.reservation else queue.limits
    least = min((rule.nodes[0] if rule.nodes else 1 for rule in rules), default=1)
    if spec.nodes is None and least > 1:
        where = f"{spec.queue or site.queue}; {site.source(queue.source)}"
        yield Missing(f"nodes ({least} at least in queue {where})", "--nodes", f"{least}", False)
    gpus = queue.gpus if spec.gpus_per_node is None else spec.gpus_per_node
    if gpus is None:
        yield Missing("GPUs per node (0 for none)", "--gpus-per-node", "4", True)
    has_cpus = spec.cpus_per_rank or spec.cpus_per_node or queue.cpus or (queue.cpus_per_gpu and gpus) or cpus_known
    if not has_cpus:
        yield Missing("CPUs per rank", "--cpus-per-rank", "8", True)
    if "mem" in site.chunk and not spec.mem_gb and queue.mem_gb is None:
        yield Missing("memory per node", "--set", "mem_gb=90", True)
    if spec.walltime_s is None and site.walltime_s is None:
        yield Missing("a walltime", "--walltime", "1:00:00", True)
    if not (spec.launcher or site.launcher.name):
        yield Missing("a launcher", "--launcher", JOB_LAUNCHERS[0], True)
    for name, variable in site.vars.items():
        if variable.required and not variable.default and not (spec.variables or {}).get(name):
            what = f"{name} ({site.source(variable.source)})"
            yield Missing(what, "--set", f"{name}={variable.example or 'VALUE'}", True)


def known(value: int | None) -> int:
    """A value that `check_complete` has found in the request or the site."""
    if value is None:
        raise AssertionError("plan_job calls check_complete first")
    return value


def check_complete(spec: JobSpec, site: Site, cpus_known: bool) -> None:
    """Raises one error for all that is missing, with a hint that can be typed as it stands.

    SiteError if a fact is among it that site files usually have, else RequestError.
    """
    if spec.queue and site.queues and spec.queue not in site.queues:
        return  # whose node is it? The queue is refused first
    found = list(list_missing(spec, site, cpus_known))
    names = [one.what for one in found] + ([] if spec.command else ["a command"])
    if not names:
        return
    if not found:
        what = "the request has no command"
        raise RequestError(what, "put it last: -- python train.py; or --demo for the built-in training job")
    typed = " ".join(f"{one.option} {one.example}" for one in found)
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    error = SiteError if any(one.of_site for one in found) else RequestError
    what = f"a job on site {site.name} still needs {listed}"
    raise error(what, typed if spec.command else f"{typed} -- python train.py")


# ---- nodes, ranks, GPUs, CPUs, memory


class Shape(Record):
    """Size of a job. CPUs are what the scheduler counts (cores or hardware threads), threads are cores.
    `gpus_per_rank` is 1 where ranks share one, too; `mem_gb` is of each node, 0 where nothing is said about it.
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    gpus_per_rank: int
    cpus_per_node: int
    cpus_per_rank: int
    threads_per_rank: int
    mem_gb: int


def plan_shape(spec: JobSpec, site: Site, queue: Queue, local_cpus: int | None = None) -> Shape:
    """The shape of `spec` on a node of `queue`. With `local_cpus` this machine is the node, and may be overbooked.

    Raises RequestError when a node cannot hold the request. `check_complete` has seen that every number is given.
    """
    gpus = known(queue.gpus if spec.gpus_per_node is None else spec.gpus_per_node)
    each = spec.gpus_per_rank or 1
    if each > 1:
        _check_shares(spec, gpus, each)
    ranks = spec.ranks_per_node or max(gpus // each, 1)
    if spec.exclusive and queue.cpus:  # the whole node is charged, so that the job has all of it
        queue = queue._replace(exclusive=True, cpus_per_gpu=None)
    with_gpus = queue.cpus_per_gpu * gpus if queue.cpus_per_gpu and gpus else _even_share(site, queue, gpus)
    available = spec.cpus_per_node or with_gpus or queue.cpus or local_cpus
    cpus = known(available) // ranks if spec.cpus_per_rank is None else spec.cpus_per_rank
    cpus = max(cpus, 1)
    if local_cpus is None:
        share = f"that go with {format_count(gpus, 'GPU')}" if available == with_gpus else "of a node"
        _check_fit(site, queue, gpus, ranks, cpus, available, share)
    threads = cpus // 2 if queue.cpu_unit == "hwthread" else cpus
    on_node = spec.cpus_per_node or with_gpus or cpus * ranks
    memory = _plan_memory(spec, site, queue, gpus)
    return Shape(spec.nodes or 1, ranks, gpus, each, on_node, cpus, max(threads, 1), memory)


def check_whole_nodes(site: Site, queue: Queue, nodes: int, cpus: int, *, requested: bool = False) -> None:
    """RequestError for parts of several nodes where a request is the totals of a job: the server would pack `cpus` of
    each into fewer nodes. `requested`: the request names them."""
    if site.size != "totals" or nodes == 1 or not queue.cpus or cpus == queue.cpus:
        return
    source = site.source(site.cited.get("size", ""))
    all_of_it = f"--gpus-per-node {queue.gpus}" if queue.gpus else f"--set cpus_per_node={queue.cpus}"
    all_of_it = "leave out cpus_per_node" if requested else all_of_it
    raise RequestError(
        f"site {site.name} is asked for the totals of a job: {nodes} nodes are whole nodes, of {queue.cpus} CPUs each,"
        f" not {format_count(cpus, 'CPU')} ({source})",
        f"{all_of_it}, or --nodes 1",
    )


def _even_share(site: Site, queue: Queue, gpus: int) -> int | None:
    """The CPUs that go with a part of a shared node's GPUs, where the guide gives no number for each: the same part of
    the CPUs. None where the node, or a fixed resource type, is the job's alone."""
    if queue.exclusive or site.size == "type" or not queue.cpus or not queue.gpus or not 0 < gpus < queue.gpus:
        return None
    return max(queue.cpus * gpus // queue.gpus, 1)


def _check_shares(spec: JobSpec, gpus: int, each: int) -> None:
    """RequestError unless ranks with so many GPUs each take all of a node's."""
    ranks = spec.ranks_per_node or max(gpus // each, 1)
    if ranks * each != gpus:
        take = f"{format_count(ranks, 'rank')} per node {'takes' if ranks == 1 else 'take'}"
        what = f"gpus_per_rank {each}: {take} {ranks * each} GPUs, and a node has {format_count(gpus, 'GPU')} here"
        raise RequestError(what, "leave out gpus_per_rank")


def _plan_memory(spec: JobSpec, site: Site, queue: Queue, gpus: int) -> int:
    """Plan the memory: the requested one; else the node's, if the site's request must name memory: by the share of
    GPUs if the node is shared."""
    if spec.mem_gb:
        if queue.mem_gb and spec.mem_gb > queue.mem_gb:
            what = f"{spec.mem_gb} GB do not fit on a node of {queue.mem_gb} GB ({site.source(queue.source)})"
            raise RequestError(what, f"nearest: --set mem_gb={queue.mem_gb}")
        return spec.mem_gb
    asks = "mem" in site.chunk or (site.asks_memory and not queue.exclusive and queue.mem_gb)
    if not asks:
        return 0
    mem_gb = known(queue.mem_gb)
    return mem_gb * gpus // queue.gpus if queue.gpus and gpus and not queue.exclusive else mem_gb


def _check_fit(site: Site, queue: Queue, gpus: int, ranks: int, cpus: int, available: int | None, share: str) -> None:
    """RequestError for more than a node has: the job would wait forever, or run on fewer CPUs than asked for. `share`:
    whose the CPUs are that are available."""
    source = site.source(queue.source)
    if queue.gpus is not None and gpus > queue.gpus:
        what = f"{format_count(gpus, 'GPU')} per node do not fit: a node has {queue.gpus} ({source})"
        raise RequestError(what, f"nearest: --gpus-per-node {queue.gpus}")
    most = min(filter(None, (queue.cpus, available)), default=None)
    whose = share if most != queue.cpus else "of a node"
    too_many = queue.cpus is not None and available is not None and available > queue.cpus
    if most is not None and (cpus * ranks > most or too_many):
        raise RequestError(
            f"{format_count(ranks, 'rank')} of {format_count(cpus, 'CPU')} do not fit on the"
            f" {format_count(most, 'CPU')} {whose} ({source})",
            f"nearest: --cpus-per-rank {most // ranks}" if most >= ranks else f"nearest: --ranks-per-node {most}",
        )


# ---- the command and its variables


def plan_command(spec: JobSpec, rank_maker: str) -> tuple[str, ...]:
    """The words that each rank runs.

    `rank_maker` is what makes the ranks in place of the job's launcher, "" if that does.
    """
    command = spec.command or ()
    _refuse_nothing(command)
    found = find_launch_command(command)
    if found is not None and found[1] != rank_maker:  # N times N ranks
        what = f"the command starts its own ranks with {found[1]}, under a launcher that makes one per rank already"
        raise RequestError(what, hint_instead_of(found[1]))
    return command


def find_script(command: tuple[str, ...]) -> str | None:
    """The file that the command runs: what python or a shell is given first, or a program with its path."""
    program = command[0]
    if not re.fullmatch(r"(.*/)?(python[\d.]*|bash|sh)", program):
        return program if "/" in program else None
    words = iter(command[1:])
    for word in words:
        if re.fullmatch(r"-(\w*[cm])?", word):  # also among other letters, such as bash -lc; "-" is standard input
            return None
        if word in {"-W", "-X", "-o"}:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def plan_variables(spec: JobSpec, site: Site) -> tuple[tuple[str, str], ...]:
    """The site's variables, then the job's, which win."""
    # schedulers' names without a prefix, such as JOB_ID, may be a program's own as well
    of_schedulers = (name for row in scripted_schedulers() for name in row.variables.prefixes if name.endswith("_"))
    reserved = (*_RESERVED_PREFIXES, *of_schedulers) if spec.env else ()
    for name in spec.env or ():
        instead = {"PYTHONPATH": "use pythonpath: [FOLDER]", "PATH": "use python: or venv:"}.get(name)
        if name not in SETTABLE and (name in _RESERVED or name.startswith(reserved) or instead):
            raise RequestError(f"env {name} is set by the job script itself", instead or f"leave {name} out of env")
    return tuple({**site.env, **(spec.env or {})}.items())


def check_separator(words: Iterable[str], launcher: str) -> None:
    """RequestError for a word that ends one program's arguments: what follows would be run as another program."""
    if launcher and _SEPARATOR in words:
        raise RequestError(
            f"an argument is {_SEPARATOR!r} alone, with which {launcher} begins another program: no program can get it",
            "put the command into a script: -- bash train.sh",
        )


def _refuse_nothing(command: tuple[str, ...]) -> None:
    """RequestError for a command that only a shell knows."""
    if not command:
        return
    first = command[0]
    if not first.strip() or "\n" in first or first in _OF_SHELL or re.match(r"[A-Za-z_]\w*=", first, re.ASCII):
        what = f"the command begins with {first!r}, which is no program, and no shell reads it"
        raise RequestError(what, "-- bash -c '…' for a shell's line; env: and modules: of the job file go before it")


def plan_job(spec: JobSpec, site: Site, planned_by: PlannedBy) -> JobPlan:
    """Decide every value of the job that `spec` asks for on `site`.

    Raises RequestError for what the site does not take or no script could carry, SiteError for a fact that is missing.
    """
    scheduler = find_scheduler(site.scheduler)
    array = scheduler.directives.options.get("array")
    spec, rank_maker = plan_rank_maker(plan_sweep(spec, array is not None and array not in site.rejects))
    name = os.path.basename((spec.resume or "").rstrip("/")) or name_run(spec)
    check_recovery_keys(spec, site.scheduler)
    check_complete(spec, site, cpus_known=scheduler.this_machine)
    queue_name = plan_queue(spec, site)
    queue = site.queues.get(queue_name, Queue())
    site = site._replace(account=site.account_of(queue_name))
    shape = plan_shape(spec, site, queue, planned_by.cpus if scheduler.this_machine else None)
    check_gpu_chunks(spec, site, queue_name, shape.ranks_per_node, shape.gpus_per_node)
    allocated = shape.nodes + (spec.spares or 0)
    check_whole_nodes(site, queue, allocated, shape.cpus_per_node, requested=spec.cpus_per_node is not None)
    walltime_s = known(spec.walltime_s or site.walltime_s)
    if queue_name in site.queues and not spec.reservation:  # a reservation has limits of its own
        check_limits(site, queue_name, allocated, walltime_s, allocated * shape.gpus_per_node)
    if spec.stage_in and not (spec.stage_dir or site.staging.folder):
        raise SiteError(f"site {site.name} does not name a node's own disk", "--set stage_dir=/local/scratch")
    if THEN in (spec.stage_in or ()):
        raise RequestError(f"stage_in: {THEN} cannot be the name of a file here", f"write it as ./{THEN}")
    command = plan_command(spec, rank_maker.maker)
    launcher, outer_launcher = plan_launcher(spec, site, shape.nodes, rank_maker.node_agent)
    container = plan_container(spec, site, queue, shape.gpus_per_node)
    if container.launcher:
        outer_launcher = outer_launcher or container.launcher
        if outer_launcher != container.launcher:
            what = f"container_runtime {container.runtime} works with {container.launcher} only"
            raise RequestError(what, f"--launcher {container.launcher}")
    swept = [value for values in (spec.sweep or {}).values() for value in values]
    check_separator((*command, *(spec.stage_in or ()), *swept), outer_launcher)
    account, account_option, account_remarks = plan_account(spec, site)
    by_node_agents = LAUNCHERS[launcher].is_node_agent
    warns = outer_launcher != "" and LAUNCHERS[outer_launcher].of_scheduler and not by_node_agents
    requested = requested_options(spec, site, warned_by_scheduler=warns)
    options = plan_scheduler_options(spec, site, requested)
    words = plan_site_words(spec, site)
    full = queue.exclusive and not by_node_agents and shape.ranks_per_node == shape.gpus_per_node == queue.gpus
    # the order in which a rank's GPU is next to its CPUs, where the site's own list of CPUs does not need all ranks
    near = len(site.gpu_order) == shape.gpus_per_node and (full or not site.launcher.bind_full)
    run_dir = (spec.run_dir or os.path.join(RUNS, name)).rstrip("/") or "/"
    if spec.resume:
        if spec.fresh:
            what = f"--fresh begins a new run, and --resume {spec.resume} resumes an old one"
            raise RequestError(what, "keep one of the two")
        if options.array:
            what = f"resume {spec.resume} is one run, but each index of array {options.array} has its own"
            raise RequestError(what, "leave out resume: each index resumes its unfinished run")
        run_dir = spec.resume.rstrip("/") if "/" in spec.resume else os.path.join(os.path.dirname(run_dir), name)
    plan = JobPlan(
        site=site,
        spec=spec,
        planned_by=planned_by,
        name=name,
        queue=queue_name,
        queue_profile=queue,
        account=account,
        account_option=account_option,
        **shape._asdict(),
        allocated_nodes=allocated,
        walltime_s=walltime_s,
        launcher=launcher,
        outer_launcher=outer_launcher,
        modules=site.modules.load if spec.modules is None else spec.modules,
        env=(*plan_variables(spec, site), *_request_variables(spec)),
        pythonpath=(*(spec.pythonpath or ()), *filter(None, [planned_by.source_root])),
        python=plan_python(spec, planned_by.python),
        run_dir=run_dir,
        global_batch=spec.global_batch,
        data_size=plan_data_size(spec, shape.nodes, shape.ranks_per_node, shape.gpus_per_rank),
        rank_maker=rank_maker.maker,
        command=command,
        words=words,
        chunk=_plan_chunk(site, words, options),
        options=options,
        container=container,
        gpu_order=",".join(site.gpu_order) if near else "",
        bind=(full and site.launcher.bind_full) or site.launcher.bind,
        directives=plan_directives(spec, site, queue_name, words, container.directives, requested.values()),
        remarks=account_remarks,
    )
    check_placeholders(plan)
    plan = plan._replace(fewer_nodes=plan_fewer_nodes(plan))
    if not plan.supervised:
        _check_bare(plan)
    return plan._replace(remarks=(*_remarks(plan), *plan.remarks))


def _check_bare(plan: JobPlan) -> None:
    """RequestError for what only the supervisor could do."""
    key = next((key for key in _SUPERVISED if getattr(plan.spec, key)), "signal" if plan.warns_s else "")
    if key:
        what = f"{key} needs the supervisor, and supervise is false"
        raise RequestError(what, f"leave out supervise: false, or {key}")


def _request_variables(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Variables by which the request reaches the ranks, besides `env` of the job file."""
    each = spec.gpus_per_rank or 1
    accept = (*(spec.accept or ()), *(("command",) if spec.resume else ()))  # a run that is named takes the new words
    values = {
        "HPCDDP_GPUS_PER_RANK": str(each) if each > 1 else None,
        "HPCDDP_INDEPENDENT": "1" if spec.independent else None,
        "HPCDDP_PARALLEL": spec.parallel,
        ACCEPT: ",".join(accept) or None,
        KEEP: ",".join(spec.keep or ()) or None,
    }
    return tuple((name, value) for name, value in values.items() if value is not None)


def _plan_chunk(site: Site, words: Mapping[str, str], options: SchedulerOptions) -> tuple[str, ...]:
    """Words of the site and of the job that are added to each chunk of the request, as in PBS's select."""
    if not find_scheduler(site.scheduler).directives.chunks:
        return ()
    chosen = [v.chunk.replace("{}", words[name]) for name, v in site.vars.items() if v.chunk and name in words]
    return (*(word for word in site.chunk if "=" in word), *chosen, *filter(None, [options.constraint]))


def remark_name(plan: JobPlan) -> str | None:
    """Say how the scheduler calls the job, if that is not the run's name."""
    if plan.job_name == plan.name:
        return None
    return f"job name {plan.name!r} becomes {plan.job_name!r}: a letter first, at most {plan.name_limit} characters"


def _remark_output(plan: JobPlan) -> str | None:
    """Say where the job's output lies, if that is not the usual place."""
    keeps = plan.home_output
    name, number = ("oID.INDEX", "number and index") if plan.options.array else ("oID", "number")
    return keeps and f"the job's output will be ~/{plan.job_name}.{name}, with the job's {number} ({keeps})"


def _remark_literal(plan: JobPlan) -> str | None:
    """A word of a job file that a shell would replace, where none reads it; behind `--` a shell has read it."""
    source = plan.spec.sources.get("command", "")
    for before, word in pairwise(("", *(plan.spec.command or ()))):
        found = None if before in {"-c", "-lc"} else re.search(r"\$([A-Za-z_]|\{\w+\}|\()|`", word, re.ASCII)
        if found and source.startswith("command in "):
            return (
                f"{source}: the program gets {word!r} as it is, for no shell reads it: write its value, or bash -c '…'"
            )
    return None


def _remarks(plan: JobPlan) -> list[str]:
    """Remarks on the plan for its owner. RequestError for a warning signal that cannot come."""
    remarks: list[str] = []
    signal_s = plan.options.signal_s
    if signal_s >= plan.walltime_s:
        raise RequestError(f"signal {format_walltime(signal_s)} is not within {plan.walltime}", "--set signal=0:02:00")
    if signal_s and plan.rank_maker not in {"", SOME_COMMAND}:
        raise RequestError(
            f"signal: {plan.rank_maker} is the command, so it gets SIG{WARNING_SIGNAL}, "
            "and ends at it before its ranks",
            "let hpcddp start the ranks: leave its words out of the command",
        )
    remarks += filter(None, [remark_name(plan), _remark_output(plan), _remark_literal(plan)])
    if plan.ranks_per_node > plan.gpus_per_node > 0:
        gpus = format_count(plan.gpus_per_node, "GPU")
        remarks.append(f"{plan.ranks_per_node} ranks share {gpus} on each node; NCCL wants one each")
    if plan.global_batch:
        from hpcddp.batchplan import plan_batch  # most requests name no global batch

        batch = plan_batch(plan.global_batch, plan.data_size, plan.spec.max_micro_batch)
        remarks.append(f"global batch {batch}")
    remarks += filter(None, [remark_recovery(plan)])
    if plan.launcher in plan.site.launcher.node_agents:
        remarks.append(f"{plan.launcher}: {plan.site.launcher.node_agents[plan.launcher]}")
    if plan.options.array:
        remarks.append(f"each index of the array has a run of its own: {plan.run_dir}.INDEX")
    return remarks
