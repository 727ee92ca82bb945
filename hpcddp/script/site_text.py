"""A site in words: what `hpcddp sites show` prints, and one page about it in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp import __version__
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import JobPlan, PlannedBy, list_missing, plan_job
from hpcddp.script.site import Limit, Queue, Site
from hpcddp.script.spec import JobSpec, read_spec
from hpcddp.units import format_count, format_walltime


def site_rows(site: Site) -> list[tuple[str, str]]:
    """List a site's properties for users, one a row."""
    queues = [
        (f"queue {name}", format_queue(queue) + (" (default)" if name == site.queue else ""))
        for name, queue in site.queues.items()
    ]
    rows = [
        ("scheduler", site.scheduler),
        ("account", _format_account(site)),
        ("walltime", f"{format_walltime(site.walltime_s)} if not said" if site.walltime_s else "--walltime"),
        *queues,
        *((f"own key {name}", _format_variable(site, name)) for name in site.vars),
        ("modules", " ".join(site.modules.load) or "none"),
        ("launcher", site.launcher.name or "--launcher: the guide names none"),
        ("network", site.rendezvous.suffix and f"ranks meet on HOST{site.rendezvous.suffix}"),
        ("own disk", site.staging.folder),
        ("containers", site.container.runtime),
        ("refused", " ".join(site.rejects)),
    ]
    return [(key, value) for key, value in rows if value]


def site_summary(site: Site) -> dict[str, Any]:
    """The row of a site in the list. `gpus_per_node`: of the default queue's node; None: the site does not say."""
    return {
        "name": site.name,
        "scheduler": site.scheduler,
        "gpus_per_node": site.queues.get(site.queue, Queue()).gpus,
        "standing": site.standing,
        "verified": site.verified,
        "summary": site.summary,
    }


def site_record(value: Any) -> Any:
    """A site as JSON values: the keys of its file, times in seconds. null and what is empty: the site does not say."""
    if isinstance(value, Mapping):
        return {key: site_record(one) for key, one in value.items()}
    if hasattr(value, "_asdict"):
        return site_record(value._asdict())
    return [site_record(one) for one in value] if isinstance(value, tuple) else value


def format_queue(queue: Queue) -> str:
    """Format a queue: its node and its rules."""
    unit = "hardware threads" if queue.cpu_unit == "hwthread" else "cores"
    of_model = f"{queue.gpus} x {queue.gpu}" if queue.gpus and queue.gpu else format_count(queue.gpus or 0, "GPU")
    parts = [
        f"QOS {queue.qos}" if queue.qos else "",
        f"partition {queue.partition}" if queue.partition else "",
        "" if queue.gpus is None else of_model,
        f"{queue.cpus} {unit}" if queue.cpus else "",
        f"{queue.mem_gb} GB" if queue.mem_gb else "",
        *map(_format_limit, queue.limits),
        _format_queue_account(queue.account),
    ]
    return ", ".join(p for p in parts if p) or "nothing known"


def _format_queue_account(account: Mapping[str, Any]) -> str:
    """Format what is said of accounts for one queue alone."""
    required = {True: "required", False: "optional"}.get(account.get("required", ""), "")
    parts = [required, f"matches {account['pattern']}" if "pattern" in account else "", account.get("option", "")]
    return " ".join(filter(None, ["account", *parts])) if account else ""


def missing_options(site: Site) -> list[tuple[str, str]]:
    """List what the site's file does not say, as (option, an example), for its default queue."""
    this_machine = find_scheduler(site.scheduler).this_machine
    return [(one.option, one.example) for one in list_missing(JobSpec(), site, cpus_known=this_machine)]


def _format_account(site: Site) -> str:
    rule = site.account
    scheduler = find_scheduler(site.scheduler)
    if (rule.option or scheduler.directives.account) == "none":
        return "none"
    submit = " ".join(scheduler.commands.submit)
    where = (
        f"on the command line, {submit} {rule.option}" if rule.command_line else rule.option or "the scheduler's option"
    )
    return f"{'required' if rule.required else 'optional'}, {where}"


def _format_variable(site: Site, name: str) -> str:
    rule = site.vars[name]
    absent = "required" if rule.required else "optional"
    need = f"{rule.default} if not said" if rule.default else absent
    example = f"; for example {rule.example}" if rule.example else ""
    return f"{need}: {rule.meaning or 'see the guide'}{example}"


def _format_limit(rule: Limit) -> str:
    spans = [(rule.nodes, "node"), (rule.gpus, "GPU")]
    size = " and ".join(
        f"{s[0]}-{s[1]} {word}s" if s[1] > s[0] else f"{s[0]} {word}{'s' if s[0] > 1 else ''}" for s, word in spans if s
    )
    most = f"up to {format_walltime(rule.walltime_s)}" if rule.walltime_s else ""
    hours = f"and {rule.node_hours:g} node-hours" if rule.node_hours else ""
    return " ".join(p for p in (size, most, hours) if p)


# ---- one page about a site


def page_of(site: Site, made_by: str) -> str:
    """The site's page; `made_by` is what made it."""
    from hpcddp.script.render import render_script  # jinja2, which the other texts do without

    given = " ".join(f"{option} {value}" for option, value in _examples(site))
    request = f"--site {site.name} {given}".rstrip()
    basis = {
        "documented": "the site's own documentation",
        "practice": "scripts and notes of users or staff, not the site's manual: read one script before you trust it",
        "generic": "its scheduler's documentation; your options say what a node has",
    }[site.standing]
    submit = " ".join(find_scheduler(site.scheduler).commands.submit) or "bash"
    prefix = find_scheduler(site.scheduler).directives.prefix
    pattern = f"^{prefix.replace('$', '[$]')} " if prefix else "^launcher="
    plan = _plan(site)
    follow = "`hpcddp status`, `hpcddp logs train -f` and `hpcddp cancel train` follow the run."
    if site.size == "nodes":  # Torque's answers are not read
        follow = "the scheduler's own commands and `hpcddp logs train` show how far it is."
    lines = [
        f"# {site.name}",
        "",
        f"<!-- made by {made_by} from the site's file -->",
        "",
        f"This page shows how to queue and follow a job on {site.name}, and its queues and limits.",
        "",
        f"{site.summary}. User guide: <{site.guide}>. The facts are from {basis}; verified {site.verified}.",
        "",
        "```console",
        f"$ hpcddp render {request} -- python train.py > job.sh",
        f"hpcddp: site {site.name} (--site)",
        *(f"hpcddp: {remark}" for remark in plan.remarks),
        f"$ grep '{pattern}' job.sh",
        *(line for line in render_script(plan).splitlines() if re.search(pattern, line)),
        "```",
        "",
        f"`{submit} job.sh` {'queues' if prefix else 'runs'} it. `hpcddp submit` with the same options does both; "
        f"then {follow}",
        "",
        *_to_fill_in(site),
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in site_rows(site)),
        "",
    ]
    if site.notes:
        lines += ["What you have to do without hpcddp:", "", *(f"- {note}" for note in site.notes), ""]
    if site.sources:
        lines += ["| source | address | date |", "|---|---|---|", *_source_rows(site), ""]
    return "\n".join(lines)


def _examples(site: Site) -> list[tuple[str, str]]:
    rule = site.account_of(site.queue)
    names = ("abc123", "abcd-gpu", "project_465000000")
    fitting = (name for name in names if re.fullmatch(rule.pattern or ".*", name))
    account = next(fitting, rule.example or "NAME")
    return [(option, account if option == "--account" else value) for option, value in missing_options(site)]


def _plan(site: Site) -> JobPlan:
    """Plan the page's example as `hpcddp render` does."""
    given = {"site": site.name, "command": "python train.py"}
    for option, value in _examples(site):
        key, _, text = value.partition("=") if option == "--set" else (option[2:].replace("-", "_"), "", value)
        given[key] = text
    spec = read_spec({key: (value, key) for key, value in given.items()}, site.vars)
    return plan_job(spec, site, PlannedBy(python="/usr/bin/python3", version=__version__, created_by="", cpus=1))


def _to_fill_in(site: Site) -> list[str]:
    missing = missing_options(site)
    if not missing:
        return []
    return [
        "The site's file does not give "
        + ", ".join(f"`{option} {value}`" for option, value in missing)
        + ": use your own values.",
        "",
    ]


def _source_rows(site: Site) -> Iterator[str]:
    for key in site.sources:
        address, _, date = site.source(key).rpartition(", ")
        yield f"| {key} | {f'<{address}>' if address.startswith('http') and ' ' not in address else address} | {date} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
