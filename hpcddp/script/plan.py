"""The decision: a request and a site become a JobPlan, every value that a template may print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from hpcddp.errors import RequestError, SiteError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.runs.choice import check_asked
from hpcddp.runs.command import name_command
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import LONGEST_NAME
from hpcddp.script.choices import check_gpu_chunks, plan_account, plan_launcher, plan_queue, plan_site_words
from hpcddp.script.command import check_separator, plan_command, plan_variables
from hpcddp.script.container import plan_container, plan_python
from hpcddp.script.directives import job_name, plan_directives
from hpcddp.script.jobplan import SOME_COMMAND, WARNING, JobPlan, PlannedBy
from hpcddp.script.limits import check_limits
from hpcddp.script.missing import check_complete, known
from hpcddp.script.own_ranks import plan_own_ranks, remark_counted
from hpcddp.script.recover import check_asked_recovery, plan_fewer_nodes, remark_recovery
from hpcddp.script.scheduler_options import SchedulerOptions, asked_options, plan_scheduler_options
from hpcddp.script.shape import Shape, check_whole_nodes, plan_shape
from hpcddp.script.shares import check_placeholders, plan_data_size
from hpcddp.script.site import Queue, Site
from hpcddp.script.sources import plan_sources
from hpcddp.script.spec import JobSpec
from hpcddp.script.sweeping import plan_sweep
from hpcddp.supervisor.line import THEN
from hpcddp.units import format_count, format_walltime

_OF_SUPERVISOR = ("chain", "max_restarts", "stage_in", "stage_dir", "fresh", "resume", "sweep")

__all__ = ["JobPlan", "PlannedBy", "plan_job", "remark_name"]


def plan_job(spec: JobSpec, site: Site, planned_by: PlannedBy) -> JobPlan:
    """Decide every value of the job that `spec` asks for on `site`.

    Raises RequestError for what the site does not take or no script could carry, SiteError for a fact that is missing.
    """
    scheduler = find_scheduler(site.scheduler)
    array = scheduler.directives.options.get("array")
    spec, own_ranks = plan_own_ranks(plan_sweep(spec, array is not None and array not in site.rejects))
    check_asked_recovery(spec, site.scheduler)
    check_complete(spec, site, cpus_known=scheduler.this_machine)
    queue_name = plan_queue(spec, site)
    queue = site.queues.get(queue_name, Queue())
    site = site._replace(account=site.account_of(queue_name))
    shape = plan_shape(spec, site, queue, planned_by.cpus if scheduler.this_machine else None)
    check_gpu_chunks(spec, site, queue_name, shape.ranks_per_node, shape.gpus_per_node)
    check_whole_nodes(
        site, queue, shape.nodes + (spec.spares or 0), shape.cpus_per_node, asked=spec.cpus_per_node is not None
    )
    counted = remark_counted(own_ranks, shape.nodes, shape.ranks_per_node, shape.gpus_per_node)
    walltime_s = known(spec.walltime_s or site.walltime_s)
    if queue_name in site.queues and not spec.reservation:  # a reservation has limits of its own
        allocated = shape.nodes + (spec.spares or 0)
        check_limits(site, queue_name, allocated, walltime_s, allocated * shape.gpus_per_node)
    if spec.stage_in and not (spec.stage_dir or site.staging.folder):
        raise SiteError(f"site {site.name} does not name a node's own disk", "--set stage_dir=/local/scratch")
    if THEN in (spec.stage_in or ()):
        raise RequestError(f"stage_in: {THEN} cannot be the name of a file here", f"write it as ./{THEN}")
    command = plan_command(spec, own_ranks.maker)
    name = job_name(spec.name or name_command(command), _name_limit(site))
    launcher, outer_launcher = plan_launcher(spec, site, shape.nodes, own_ranks.agent)
    container = plan_container(spec, site, queue, shape.gpus_per_node)
    if container.launcher:
        outer_launcher = outer_launcher or container.launcher
        if outer_launcher != container.launcher:
            raise RequestError(
                f"container_runtime {container.runtime} works with {container.launcher} only",
                f"--launcher {container.launcher}",
            )
    swept = [value for values in (spec.sweep or {}).values() for value in values]
    check_separator((*command, *(spec.stage_in or ()), *swept), outer_launcher)
    account, account_option, account_remarks = plan_account(spec, site)
    by_agents = LAUNCHERS[launcher].is_agent
    warns = outer_launcher != "" and LAUNCHERS[outer_launcher].warned_by_scheduler and not by_agents
    asked = asked_options(spec, site, warned_by_scheduler=warns)
    options = plan_scheduler_options(spec, site, asked)
    words = plan_site_words(spec, site)
    full = queue.exclusive and not by_agents and shape.ranks_per_node == shape.gpus_per_node == queue.gpus
    run_dir = (spec.run_dir or f"runs/{name}").rstrip("/") or "/"
    if spec.resume and options.array:
        raise RequestError(
            f"resume {spec.resume} is one run, but each index of array {options.array} has its own",
            "leave out resume: each index resumes its unfinished run",
        )
    plan = JobPlan(
        site=site,
        spec=spec,
        planned_by=planned_by,
        name=name,
        queue=queue_name,
        queue_facts=queue,
        account=account,
        account_option=account_option,
        nodes=shape.nodes,
        allocated_nodes=shape.nodes + (spec.spares or 0),
        ranks_per_node=shape.ranks_per_node,
        gpus_per_node=shape.gpus_per_node,
        gpus_per_rank=shape.gpus_per_rank,
        cpus_per_node=shape.cpus_per_node,
        cpus_per_rank=shape.cpus_per_rank,
        threads_per_rank=shape.threads_per_rank,
        mem_gb=shape.mem_gb,
        walltime_s=walltime_s,
        launcher=launcher,
        outer_launcher=outer_launcher,
        modules=site.modules.load if spec.modules is None else spec.modules,
        env=(*plan_variables(spec, site), *_own_variables(spec)),
        pythonpath=(*(spec.pythonpath or ()), *filter(None, [planned_by.source_root])),
        python=plan_python(spec, planned_by.python),
        run_dir=run_dir,
        global_batch=spec.global_batch,
        data_size=plan_data_size(spec, shape.nodes, shape.ranks_per_node, shape.gpus_per_rank),
        own_ranks=own_ranks.maker,
        command=command,
        words=words,
        chunk=_plan_chunk(site, words, options),
        options=options,
        container=container,
        gpu_order=_plan_gpu_order(site, shape, full=full),
        bind=(full and site.launcher.bind_full) or site.launcher.bind,
        directives=plan_directives(spec, site, queue_name, words, container.directives, asked.values()),
        remarks=(*counted, *account_remarks),
    )
    check_asked(plan.asked_run)
    check_placeholders(plan)
    plan = plan._replace(fewer_nodes=plan_fewer_nodes(plan))
    if not plan.supervised:
        _check_bare(plan)
    return plan._replace(remarks=(*_remarks(plan), *plan.remarks), sources=plan_sources(plan))


def _plan_gpu_order(site: Site, shape: Shape, *, full: bool) -> str:
    """The order in which a rank's GPU is next to its CPUs: for all GPUs of a node, each with its rank where the site's
    own list of CPUs makes it so."""
    near = len(site.gpu_order) == shape.gpus_per_node and (full or not site.launcher.bind_full)
    return ",".join(site.gpu_order) if near else ""


def _check_bare(plan: JobPlan) -> None:
    """RequestError for what only the supervisor could do."""
    asked = {key: getattr(plan.spec, key) for key in _OF_SUPERVISOR}
    asked["signal"] = plan.warns_s
    for key, value in asked.items():
        if value:
            raise RequestError(
                f"{key} needs the supervisor, and supervise is false", f"leave out supervise: false, or {key}"
            )


def _own_variables(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """What the request says to the ranks beside the job's own variables."""
    each = spec.gpus_per_rank or 1
    told = {
        "HPCDDP_GPUS_PER_RANK": str(each) if each > 1 else None,
        "HPCDDP_INDEPENDENT": "1" if spec.independent else None,
        "HPCDDP_PARALLEL": spec.parallel,
    }
    return tuple((name, value) for name, value in told.items() if value is not None)


def _plan_chunk(site: Site, words: Mapping[str, str], options: SchedulerOptions) -> tuple[str, ...]:
    """What the site's and the job's own words add to each chunk of the request, as in PBS's select."""
    if not find_scheduler(site.scheduler).directives.chunks:
        return ()
    own = [v.chunk.replace("{}", words[name]) for name, v in site.variables.items() if v.chunk and name in words]
    return (*(word for word in site.chunk if "=" in word), *own, *filter(None, [options.constraint]))


def _remark_batch(plan: JobPlan, global_batch: int) -> str:
    """The split; where it is uneven, the numbers of nodes near by with an even one."""
    from hpcddp.batchplan import list_even_splits, plan_batch  # most requests name no global batch

    told = f"global batch {plan_batch(global_batch, plan.data_size, plan.spec.max_micro_batch)}"
    if global_batch % plan.data_size == 0 or plan.data_size < plan.world_size:
        return told
    even = [str(n // plan.ranks_per_node) for n in list_even_splits(global_batch, plan.world_size, plan.ranks_per_node)]
    return f"{told}; evenly on {' or '.join(even)} {'node' if even == ['1'] else 'nodes'}" if even else told


def remark_name(plan: JobPlan) -> str | None:
    """What became of the name that was asked for, or of the script's, if it is another one."""
    asked, limit = plan.spec.name or name_command(plan.command), _name_limit(plan.site)
    if plan.name == asked:
        return None
    rule = f"a letter, then letters, digits and _ . + -, at most {limit} in all"
    return f"job name {asked!r} becomes {plan.name!r}: schedulers take {rule}"


def _remark_output(plan: JobPlan) -> str | None:
    """Where the job's output lies, if that is not where everybody looks."""
    pattern = find_scheduler(plan.site.scheduler).directives.home_output
    keeps = next((text for text in plan.directives if pattern and re.fullmatch(pattern, text)), None)
    name, number = ("oID.INDEX", "number and index") if plan.options.array else ("oID", "number")
    return keeps and f"the job's output will be ~/{plan.name}.{name}, with the job's {number} ({keeps})"


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


def _name_limit(site: Site) -> int:
    limits = find_scheduler(site.scheduler).directives.name_limits
    return limits.get(site.size) or limits.get("") or LONGEST_NAME


def _remarks(plan: JobPlan) -> list[str]:
    """What a person should know of the decision. Raises RequestError for a warning signal that cannot come."""
    remarks: list[str] = []
    scheduler = find_scheduler(plan.site.scheduler)
    signal_s = plan.options.signal_s
    if signal_s >= plan.walltime_s:
        raise RequestError(f"signal {format_walltime(signal_s)} is not within {plan.walltime}", "--set signal=0:02:00")
    if signal_s and plan.own_ranks not in {"", SOME_COMMAND}:
        raise RequestError(
            f"signal: {plan.own_ranks} is the command, so it gets SIG{WARNING}, and ends at it before its ranks",
            "let hpcddp start the ranks: leave its words out of the command",
        )
    remarks += filter(None, [remark_name(plan), _remark_output(plan), _remark_literal(plan)])
    if plan.ranks_per_node > plan.gpus_per_node > 0:
        gpus = format_count(plan.gpus_per_node, "GPU")
        remarks.append(f"{plan.ranks_per_node} ranks share {gpus} on each node; NCCL wants one each")
    one_gpu = scheduler.one_gpu.option
    if one_gpu and plan.ranks_per_node > 1 and any(d.startswith(one_gpu) for d in plan.spec.directives or ()):
        remarks.append(f"{one_gpu} shows each rank one GPU, which can keep them from copying GPU to GPU")
    for text in plan.spec.directives or ():
        each = re.fullmatch(rf"{one_gpu or 'none'}=(?:[\w.-]+:)?(\d+)", text, re.ASCII)
        if each and plan.gpus_per_node and int(each[1]) * plan.ranks_per_node != plan.gpus_per_node:
            gpus = format_count(plan.gpus_per_node, "GPU")
            what = f"{plan.ranks_per_node} ranks with {text} are not the {gpus} of each node"
            raise RequestError(what, f"leave out {text}, or {one_gpu}={plan.gpus_per_rank or 1}")
    if plan.global_batch:
        remarks.append(_remark_batch(plan, plan.global_batch))
    remarks += remark_recovery(plan)
    if plan.launcher in plan.site.launcher.agents:
        remarks.append(f"{plan.launcher}: {plan.site.launcher.agents[plan.launcher]}")
    if plan.options.chain and plan.options.output and scheduler.directives.overwrites_output:
        remarks.append(f"each attempt of the chain writes {plan.options.output} anew; attempts/ID/logs/job.log stay")
    if plan.options.array:
        remarks.append(f"each index of the array has a run of its own: {plan.run_dir}.INDEX")
    return remarks
