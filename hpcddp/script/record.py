"""What the script writes into the run folder: the plan as one line of JSON, the request as a job file."""

from __future__ import annotations

import json
import re
from typing import Any

from hpcddp.errors import RequestError
from hpcddp.runs.jsonfile import SCHEMA
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import JobPlan
from hpcddp.script.recover import plan_recovery
from hpcddp.script.spec import spec_items
from hpcddp.script.words import LONGEST_ARGUMENT, quote_word
from hpcddp.supervisor.order import Order, format_order
from hpcddp.sweep import count_points
from hpcddp.units import format_walltime


def plan_record(plan: JobPlan) -> dict[str, Any]:
    """The plan as JSON values, for ranks and checks to compare with what is."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "site": plan.site.name,
        "scheduler": plan.site.scheduler,
        "launcher": plan.launcher,
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "world_size": plan.world_size,
        "gpus_per_node": plan.gpus_per_node,
        "cpus_per_rank": plan.cpus_per_rank,
        "threads_per_rank": plan.threads_per_rank,
        "walltime_s": plan.walltime_s,
        "queue": plan.queue or None,
        "account": plan.account or None,
        "global_batch": plan.global_batch,
        "command": list(plan.command),
        "run_dir": plan.run_dir,
        "created_by": plan.planned_by.created_by,
        **({"gpus_per_rank": plan.gpus_per_rank} if plan.gpus_per_rank > 1 else {}),
        **({"parallel": plan.spec.parallel} if plan.spec.parallel else {}),
    }


def format_job_order(plan: JobPlan) -> str:
    """One bash word: what the supervisor has to know."""
    endless = find_scheduler(plan.site.scheduler).this_machine and plan.spec.walltime_s is None
    order = Order(
        request=format_request(plan),
        plan=plan_record(plan),
        makes_ranks=plan.makes_ranks,
        walltime_s=None if endless else plan.walltime_s,
        warns_s=plan.warns_s,
        chain=plan.options.chain,
        follow_options=submit_options(plan),
        fresh=bool(plan.spec.fresh),
        resume=plan.spec.resume,
        recover=plan_recovery(plan),
        calls=plan.outer_launcher if plan.agents else "",
        made=plan.made_run,
        resumes=plan.resumed_run,
        stages=bool(plan.spec.stage_in),
        sweep={name: list(values) for name, values in (plan.spec.sweep or {}).items()},
    )
    text = format_order(order)
    if len(text) <= LONGEST_ARGUMENT:
        return quote_word(text)
    points = count_points(plan.spec.sweep) if plan.spec.sweep else 1
    what = f"a sweep of {points} points" if points > 1 else f"a command of {len(' '.join(plan.command))} characters"
    remedy = "split the sweep into several jobs" if points > 1 else "let the program read its long list from a file"
    too_long = f"makes an argument of the job script {len(text)} bytes long, and Linux takes {LONGEST_ARGUMENT}"
    raise RequestError(f"{what} {too_long}", remedy)


def submit_options(plan: JobPlan) -> tuple[str, ...]:
    """Options of the submit command itself: an account that no directive carries."""
    return (plan.site.account.option, plan.account) if plan.account and not plan.account_option else ()


def format_request(plan: JobPlan) -> str:
    """The request as a job file: one key per line, so that no line of it can be anything else."""
    asked = plan.spec.site or ""
    items = {**spec_items(plan.spec), "site": asked if "/" in asked else plan.site.name}
    if plan.spec.sweep is not None:  # the whole sweep makes its array anew; its only point is in the other keys
        items.pop("sweep" if count_points(plan.spec.sweep) == 1 else "array", None)
    if plan.spec.sources.get("dependency", "").startswith("--after"):  # of this one submission
        items.pop("dependency", None)
    for key in ("walltime", "signal", "stall_limit"):
        if key in items:
            items[key] = format_walltime(items[key])
    return "".join(f"{key}: {_yaml(value)}\n" for key, value in items.items())


def _yaml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii() and text.isprintable():
        return text
    # What YAML does not read inside double quotes; JSON has escaped everything below the blank already.
    return re.sub("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd]", lambda c: f"\\U{ord(c[0]):08x}", text)
