"""Writes docs/sites: one page per shipped site, and the list of them. Run it after changing a site's file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hpcddp import __version__
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import JobPlan, PlannedBy, list_missing, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Queue, Site
from hpcddp.script.site_file import load_site, site_files
from hpcddp.script.site_text import site_rows
from hpcddp.script.spec import JobSpec, read_spec

_HEAD = """\
# The sites

<!-- made by docs/make_site_pages.py from the sites' files -->

This page lists the clusters that hpcddp has facts about. `hpcddp sites` prints the list:

```console
$ hpcddp sites | sed -n 1,2p
site                scheduler   GPUs/node  basis       verified
abci3               pbs         8          documented  2026-01-30  ABCI 3.0 (AIST, Japan), 8 x H200 per node
```

`hpcddp sites show NAME` prints one site. How a site is chosen, and how to write your own:
[sites.md](../sites.md), [add-a-site.md](../add-a-site.md).

| site | scheduler | GPUs per node | basis | verified | |
|---|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    sites = [load_site(name, path) for name, path in site_files({}).items()]
    rows = ""
    for site in sites:
        gpus = site.queues.get(site.queue, Queue()).gpus
        cells = [f"[`{site.name}`]({site.name}.md)", site.scheduler, "your option" if gpus is None else str(gpus)]
        rows += f"| {' | '.join([*cells, site.standing, site.verified, site.summary])} |\n"
    return {"README.md": _HEAD + rows, **{f"{site.name}.md": page_of(site) for site in sites}}


# One page about a site: what to type, its queues and limits, and the sources of the facts.


def page_of(site: Site) -> str:
    """The site's page."""
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
        "<!-- made by docs/make_site_pages.py from the site's file -->",
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


def missing_options(site: Site) -> list[tuple[str, str]]:
    """What the site's file does not say, as (option, an example), for its default queue."""
    this_machine = find_scheduler(site.scheduler).this_machine
    return [(one.option, one.example) for one in list_missing(JobSpec(), site, cpus_known=this_machine)]


if __name__ == "__main__":
    folder = Path(__file__).parent / "sites"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text)
