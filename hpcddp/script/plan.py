"""The decision: a request and a site become a JobPlan, every value that a template may print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpcddp.batchplan import list_even_splits, plan_batch
from hpcddp.errors import RequestError, SiteError
from hpcddp.script.choices import plan_account, plan_launcher, plan_queue, plan_site_words
from hpcddp.script.command import default_name, plan_command, plan_variables
from hpcddp.script.container import plan_container, plan_python
from hpcddp.script.directives import job_name, plan_directives
from hpcddp.script.handling import Handling, plan_handling
from hpcddp.script.jobplan import JobPlan, Origin
from hpcddp.script.limits import check_limits
from hpcddp.script.shape import plan_shape
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec
from hpcddp.units import format_walltime

__all__ = ["JobPlan", "Origin", "plan_job"]

_NAME_LIMIT, _TORQUE_NAME_LIMIT = 230, 15


def plan_job(spec: JobSpec, site: Site, origin: Origin) -> JobPlan:
    """Decide every value of the job that `spec` asks for on `site`.

    Raises RequestError for what the site does not take or no script could carry, SiteError for a fact that is missing.
    """
    queue_name = plan_queue(spec, site)
    queue = site.queues.get(queue_name, Queue())
    shape = plan_shape(spec, site, queue, origin.cpus if site.scheduler == "local" else None)
    walltime_s = spec.walltime_s or site.walltime_s
    if walltime_s is None:
        raise SiteError(f"site {site.name} has no default walltime", "--walltime 1:00:00")
    if queue_name in site.queues and not spec.reservation:  # a reservation has limits of its own
        check_limits(site, queue_name, shape.nodes, walltime_s, shape.nodes * shape.gpus_per_node)
    if spec.stage_in and not (spec.stage_dir or site.staging.folder):
        raise SiteError(f"site {site.name} does not name a node's own disk", "--set stage_dir=/local/scratch")
    command = plan_command(spec)
    asked_name = spec.name or default_name(command)
    name = job_name(asked_name, _TORQUE_NAME_LIMIT if (site.scheduler, site.size) == ("pbs", "nodes") else _NAME_LIMIT)
    launcher, starter = plan_launcher(spec, site, shape.nodes)
    container = plan_container(spec, site, queue, shape.gpus_per_node)
    if container.by_srun:
        starter = starter or "srun"
        if starter != "srun":
            raise RequestError(f"container_runtime {container.runtime} works with srun only", "--launcher srun")
    account, account_option, account_remarks = plan_account(spec, site)
    handling = plan_handling(spec, site)
    words = plan_site_words(spec, site)
    full = queue.exclusive and launcher != "torchrun" and shape.ranks_per_node == shape.gpus_per_node == queue.gpus
    run_dir = spec.run_dir or f"runs/{name}"
    plan = JobPlan(
        site=site,
        spec=spec,
        origin=origin,
        name=name,
        queue=queue_name,
        account=account,
        account_option=account_option,
        nodes=shape.nodes,
        ranks_per_node=shape.ranks_per_node,
        gpus_per_node=shape.gpus_per_node,
        cpus_per_node=shape.cpus_per_node,
        cpus_per_rank=shape.cpus_per_rank,
        threads_per_rank=shape.threads_per_rank,
        mem_gb=shape.mem_gb,
        walltime_s=walltime_s,
        launcher=launcher,
        starter=starter,
        modules=site.modules.load if spec.modules is None else spec.modules,
        env=plan_variables(spec, site),
        pythonpath=(*(spec.pythonpath or ()), *filter(None, [origin.source_root])),
        python=plan_python(spec, origin.python),
        run_dir=run_dir,
        global_batch=spec.global_batch,
        command=command,
        words=words,
        chunk=_plan_chunk(site, words, handling),
        handling=handling,
        container=container,
        gpu_order=",".join(site.gpu_order) if len(site.gpu_order) == shape.gpus_per_node else "",
        bind=(full and site.launcher.bind_full) or site.launcher.bind,
        directives=plan_directives(spec, site, queue_name, words, container.directives),
        remarks=account_remarks,
    )
    return replace(plan, remarks=(*_remarks(plan, asked_name), *account_remarks))


def _plan_chunk(site: Site, words: Mapping[str, str], handling: Handling) -> tuple[str, ...]:
    """What the site's and the job's own words add to each chunk of a PBS select."""
    if site.scheduler != "pbs":
        return ()
    own = [v.chunk.replace("{}", words[name]) for name, v in site.variables.items() if v.chunk and name in words]
    return (*(word for word in site.chunk if "=" in word), *own, *filter(None, [handling.constraint]))


def _remark_batch(plan: JobPlan, global_batch: int) -> str:
    """The split; where it is uneven, the numbers of nodes near by with an even one."""
    told = f"global batch {plan_batch(global_batch, plan.world_size)}"
    if global_batch % plan.world_size == 0:
        return told
    even = [str(n // plan.ranks_per_node) for n in list_even_splits(global_batch, plan.world_size, plan.ranks_per_node)]
    return f"{told}; evenly on {' or '.join(even)} {'node' if even == ['1'] else 'nodes'}" if even else told


def _remarks(plan: JobPlan, asked_name: str) -> list[str]:
    """What a person should know of the decision. Raises RequestError for a warning signal that cannot come."""
    remarks = []
    signal_s = plan.handling.signal_s
    if signal_s >= plan.walltime_s:
        raise RequestError(f"signal {format_walltime(signal_s)} is not within {plan.walltime}", "--set signal=0:02:00")
    if signal_s and plan.torchrun:
        raise RequestError(
            "signal: torchrun ends at the first SIGUSR1 and takes its ranks with it", "leave out --launcher torchrun"
        )
    if plan.name != asked_name and plan.spec.name:
        remarks.append(
            f"job name {asked_name!r} becomes {plan.name!r}: schedulers take a letter, then letters, digits and _ . + -"
        )
    if plan.ranks_per_node > plan.gpus_per_node > 0:
        remarks.append(f"{plan.ranks_per_node} ranks share {plan.gpus_per_node} GPUs on each node; NCCL wants one each")
    if plan.ranks_per_node > 1 and any(d.startswith("--gpus-per-task") for d in plan.spec.directives or ()):
        remarks.append("--gpus-per-task shows each rank one GPU, which can keep them from copying GPU to GPU")
    if plan.global_batch:
        remarks.append(_remark_batch(plan, plan.global_batch))
    if plan.torchrun and plan.site.launcher.torchrun:
        remarks.append(f"torchrun: {plan.site.launcher.torchrun}")
    if plan.handling.chain and plan.handling.output and plan.site.scheduler == "pbs":
        remarks.append(f"each attempt of the chain writes {plan.handling.output} anew; attempts/ID/logs/job.log stay")
    if plan.handling.array and plan.handling.array_limit != 1:
        remarks.append(f"the jobs of the array share {plan.run_dir}; array_limit: 1 makes them run one after the other")
    return remarks
