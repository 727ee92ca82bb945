"""`hpcddp sites`: the known sites, one of them, its page for users, and the start of a new one."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer, print_message, write_exactly
from hpcddp.errors import RequestError, SchedulerError
from hpcddp.login.planning import on_path
from hpcddp.schedulers.row import QueueFound
from hpcddp.script.site import Site
from hpcddp.script.site_file import SiteChoice, config_folder, load_site, open_site, overlay_of, site_files
from hpcddp.script.site_text import site_record, site_rows, site_summary

_DESCRIPTION = """\
List the known sites: scheduler, GPUs, the basis of the facts (documented, practice or generic) and their date.

hpcddp sites show NAME   one site's queues, limits and sources; a path to a YAML file works, too
hpcddp sites page NAME   a page for people of that site, in Markdown: what to type, queues, limits, sources
hpcddp sites check NAME  what the scheduler and the modules of this machine say otherwise
hpcddp sites new NAME    a start for a site of your own, with what this machine's scheduler says"""
_USAGE = "hpcddp sites [--json] [show NAME | page NAME | check [NAME] | new NAME [--file PATH]]"
_ACTIONS = ("show", "page", "check", "new")


def build_parser() -> VerbParser:
    parser = VerbParser(
        "sites", _DESCRIPTION, example="hpcddp sites show abci3", exits=(2, 3, 5), also={1: "check: something differs"}
    )
    parser.usage = _USAGE
    parser.add_argument("action", nargs="?", choices=_ACTIONS, metavar="ACTION", help="show, page, check or new")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the site's name, or the path of its file")
    parser.add_argument("--json", action="store_true", help="print the list, or the site, as one JSON object")
    parser.add_argument("--file", metavar="PATH", help="where new writes (~/.config/hpcddp/sites/NAME.yaml)")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints a table, one site, or a page; `new` writes a file and prints its name."""
    if args.action is None:
        known = [load_site(name, path, overlay_of(name, env)) for name, path in site_files(env).items()]
        record = {"sites": [site_summary(site) for site in known]}
        print_answer(record, _format_list(known), as_json=args.json, indent=2)
    elif args.action == "show" and args.name:
        site = open_site(SiteChoice(args.name, "hpcddp sites show"), env)
        print_answer(site_record(site), _format_site(site), as_json=args.json, indent=2)
    elif args.action == "page" and args.name:
        from hpcddp.script.site_text import page_of

        site = open_site(SiteChoice(args.name, "hpcddp sites page"), env)
        write_exactly(page_of(site, f"hpcddp sites page {args.name}"))
    elif args.action == "new" and args.name:
        write_exactly(_write_start(args.name, args.file, env) + "\n")
    elif args.action == "check":
        from hpcddp.cli.sites_check import check_site

        return check_site(args.name, env, as_json=args.json)
    else:
        raise RequestError(f"hpcddp sites {args.action} needs a site's name", f"hpcddp sites {args.action} NAME")
    return 0


def _write_start(name: str, file: str | None, env: Mapping[str, str]) -> str:
    from hpcddp.script.site_check import format_new_site

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise RequestError(f"{name!r} is no name for a site", "letters, digits and _ . -")
    path = file or os.path.join(config_folder(env), "sites", f"{name}.yaml")
    known = path if os.path.exists(path) else "" if file else site_files(env).get(name, "")
    if known:  # a file of the same name would take the place of a shipped one, without its facts
        raise RequestError(f"{known} is there already", f"edit it, or: hpcddp sites new my-{name}")
    scheduler, queues, commands = _survey(env)
    text = format_new_site(name, scheduler, time.strftime("%Y-%m-%d"), queues, commands)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as made:
        made.write(text)
    load_site(name, path)  # what was found has to be a site
    return path


def _survey(env: Mapping[str, str]) -> tuple[str, list[QueueFound], str]:
    """Scheduler, queues, and the commands that were run, of the first scheduler whose commands are all on PATH; where
    there is none, one that a person corrects."""
    from hpcddp.schedulers.registry import scripted_schedulers
    from hpcddp.schedulers.run import ask_queues

    rows = scripted_schedulers()
    for scheduler in rows:
        commands = scheduler.commands.survey
        if commands and all(on_path(command[0], env) for command in commands):
            try:
                queues = [queue for queue in ask_queues(scheduler.name, env) if queue.is_open]
            except SchedulerError as error:  # an empty form is still a start
                print_message(error.message)
                return scheduler.name, [], ""
            return scheduler.name, queues, "; ".join(map(" ".join, commands))
    return rows[0].name, [], ""


def _format_list(sites: list[Site]) -> str:
    rows = [("site", "scheduler", "GPUs/node", "basis", "verified", "")]
    for summary in map(site_summary, sites):
        cells = ["ask" if value is None else str(value) for value in summary.values()]
        rows.append((cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "".join(
        "  ".join([*(f"{c:{w}}" for c, w in zip(row, widths, strict=False)), row[5]]).rstrip() + "\n" for row in rows
    )


def _format_site(site: Site) -> str:
    rows = [
        ("guide", site.guide),
        ("facts", f"{site.standing}, verified {site.verified}, from {site.file}"),
        *([("corrected", f"by {site.overlay}")] if site.overlay else []),
        *site_rows(site),
        *(("note", note) for note in site.notes),
        *((f"source {key}", address) for key, address in site.sources.items()),
    ]
    width = max(len(key) for key, _ in rows)
    return f"{site.name}: {site.summary}\n" + "".join(f"  {key:{width}}  {value}\n" for key, value in rows)
