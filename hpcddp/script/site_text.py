"""A site in words: what `hpcddp sites show` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site import Limit, Queue, Site
from hpcddp.units import format_count, format_walltime


def site_rows(site: Site) -> list[tuple[str, str]]:
    """What a user has to know, one fact a row."""
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


def site_record(site: Site) -> dict[str, Any]:
    """The facts of `site_rows` as JSON values. Queues, limits and own keys have the names of the site file's schema,
    times in seconds; null: the site does not say."""
    return {
        **site_summary(site),
        "guide": site.guide,
        "file": site.file,
        "account": site.account._asdict(),
        "walltime_s": site.walltime_s,
        "queue": site.queue,
        "queues": {
            name: {**queue._asdict(), "limits": [limit._asdict() for limit in queue.limits]}
            for name, queue in site.queues.items()
        },
        "variables": {name: rule._asdict() for name, rule in site.vars.items()},
        "modules": list(site.modules.load),
        "launcher": site.launcher.name,
        "rendezvous_suffix": site.rendezvous.suffix,
        "staging_folder": site.staging.folder,
        "container_runtime": site.container.runtime,
        "rejects": list(site.rejects),
        "sources": dict(site.sources),
    }


def format_queue(queue: Queue) -> str:
    """Its node and its rules."""
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
    """What is said of accounts for one queue alone."""
    required = {True: "required", False: "optional"}.get(account.get("required", ""), "")
    parts = [required, f"matches {account['pattern']}" if "pattern" in account else "", account.get("option", "")]
    return " ".join(filter(None, ["account", *parts])) if account else ""


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
