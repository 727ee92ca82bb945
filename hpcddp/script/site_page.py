"""One page about a site, in Markdown: what to type, its queues and limits, and the sources of the facts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcddp import __version__
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import JobPlan
from hpcddp.script.plan import PlannedBy, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Site
from hpcddp.script.site_text import missing_options, site_rows
from hpcddp.script.spec import read_spec


def page_of(site: Site, made_by: str) -> str:
    """The site's page; `made_by` is what made it."""
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
        "then `hpcddp status`, `hpcddp logs train -f` and `hpcddp cancel train` follow the run.",
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
    """What the page asks for, as `hpcddp render` plans it."""
    given = {"site": site.name, "command": "python train.py"}
    for option, value in _examples(site):
        key, _, said = value.partition("=") if option == "--set" else (option[2:].replace("-", "_"), "", value)
        given[key] = said
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
