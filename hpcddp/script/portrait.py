"""A site in words: what `hpcddp sites show` prints, and the tables of its page in the manual."""

from __future__ import annotations

from hpcddp.script.site import Limit, Queue, Site
from hpcddp.units import format_walltime


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
        *((f"own key {name}", _format_variable(site, name)) for name in site.variables),
        ("modules", " ".join(site.modules.load) or "none"),
        ("launcher", site.launcher.name or "--launcher: the guide names none"),
        ("network", site.rendezvous.suffix and f"ranks meet on HOST{site.rendezvous.suffix}"),
        ("own disk", site.staging.folder),
        ("containers", site.container.runtime),
        ("refused", " ".join(site.rejects)),
    ]
    return [(key, value) for key, value in rows if value]


def format_queue(queue: Queue) -> str:
    """Its node and its rules."""
    unit = "hardware threads" if queue.cpu_unit == "hwthread" else "cores"
    of_model = f"{queue.gpus} x {queue.gpu}" if queue.gpus and queue.gpu else f"{queue.gpus} GPUs"
    parts = [
        "" if queue.gpus is None else of_model,
        f"{queue.cpus} {unit}" if queue.cpus else "",
        f"{queue.mem_gb} GB" if queue.mem_gb else "",
        *map(_format_limit, queue.limits),
    ]
    return ", ".join(p for p in parts if p) or "nothing known"


def missing_facts(site: Site) -> list[tuple[str, str]]:
    """What the site's file does not say, as (option, an example), for its default queue."""
    queue = site.queues.get(site.queue, Queue())
    wanted = [
        ("--account", "NAME", site.account.required),
        ("--queue", "QUEUE", not site.queue and bool(site.queues)),
        ("--gpus-per-node", "4", queue.gpus is None),
        ("--cpus-per-rank", "8", not (queue.cpus or queue.cpus_per_gpu) and site.scheduler != "local"),
        ("--set", "mem_gb=90", "mem" in site.chunk and queue.mem_gb is None),
        ("--walltime", "1:00:00", site.walltime_s is None),
        ("--launcher", "openmpi", not site.launcher.name),
    ]
    own = [("--set", f"{n}={v.example}") for n, v in site.variables.items() if v.required and not v.default]
    return [(option, value) for option, value, absent in wanted if absent] + own


def _format_account(site: Site) -> str:
    rule = site.account
    if rule.option == "none" or site.scheduler == "local":
        return "none"
    where = f"on the command line, qsub {rule.option}" if rule.command_line else rule.option or "the scheduler's option"
    return f"{'required' if rule.required else 'optional'}, {where}"


def _format_variable(site: Site, name: str) -> str:
    rule = site.variables[name]
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
