"""`hpcddp sites`: the known sites, one of them, the start of a new one, and the schema of their files."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import on_path
from hpcddp.errors import RequestError, SchedulerError
from hpcddp.script.choose import Choice, config_folder, open_site, site_files
from hpcddp.script.portrait import site_rows
from hpcddp.script.profile import load_site
from hpcddp.script.site import Queue, Site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcddp.script.survey import Found

_DESCRIPTION = """\
List the known sites: scheduler, GPUs, how the facts are founded (documented, practice or generic) and when.

hpcddp sites show NAME   one site's queues, limits and sources; a path to a YAML file works, too
hpcddp sites new NAME    a start for a site of your own, with what this machine's scheduler says
hpcddp sites schema      the keys of a site's file as JSON Schema, for editors"""
_USAGE = "hpcddp sites [show NAME | new NAME [--file PATH] | schema]"


def build_parser() -> VerbParser:
    """`[show NAME | new NAME | schema]`."""
    parser = VerbParser("sites", _DESCRIPTION)
    parser.usage = _USAGE
    parser.add_argument("action", nargs="?", metavar="show, new or schema")
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--file", metavar="PATH", help="where new writes (~/.config/hpcddp/sites/NAME.yaml)")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints a table, one site, or a schema; `new` writes a file and prints its name."""
    if args.action is None:
        sys.stdout.write(_format_list([load_site(name, path) for name, path in site_files(env).items()]))
    elif args.action == "show" and args.name:
        sys.stdout.write(_format_site(open_site(Choice(args.name, "hpcddp sites show"), env)))
    elif args.action == "new" and args.name:
        print(_write_start(args.name, args.file, env))
    elif args.action == "schema":
        import json

        from hpcddp.script.schema import site_schema

        print(json.dumps(site_schema(), indent=2))
    else:
        raise RequestError(f"hpcddp sites does not know {args.action!r}", _USAGE)
    return 0


def _write_start(name: str, file: str | None, env: Mapping[str, str]) -> str:
    from hpcddp.script.survey import format_start

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise RequestError(f"{name!r} is no name for a site", "letters, digits and _ . -")
    path = file or os.path.join(config_folder(env), "sites", f"{name}.yaml")
    if os.path.exists(path):
        raise RequestError(f"{path} is there already", f"edit it, or: hpcddp sites new {name} --file ANOTHER.yaml")
    try:
        scheduler, queues, asked = _survey(env)
    except SchedulerError as e:  # an empty form is still a start
        print(f"hpcddp: {e.message}", file=sys.stderr)
        scheduler, queues, asked = "slurm", [], ""
    text = format_start(name, scheduler, time.strftime("%Y-%m-%d"), queues, asked)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as made:
        made.write(text)
    load_site(name, path)  # what was found has to be a site
    return path


def _survey(env: Mapping[str, str]) -> tuple[str, list[Found], str]:
    """Scheduler, queues, and what was asked."""
    from hpcddp.script.survey import SINFO_FORMAT, parse_pbs, parse_sinfo

    if on_path("sinfo", env):
        command = ["sinfo", "--noheader", f"--format={SINFO_FORMAT}"]
        return "slurm", parse_sinfo(_ask(command)), " ".join(command)
    if on_path("pbsnodes", env) and on_path("qstat", env):
        queues, nodes = ["qstat", "-Q", "-f", "-F", "json"], ["pbsnodes", "-a", "-F", "json"]
        return "pbs", parse_pbs(_ask(queues), _ask(nodes)), f"{' '.join(queues)}; {' '.join(nodes)}"
    return "slurm", [], ""


def _ask(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise SchedulerError(f"{command[0]} ended with {done.returncode}: {said[0] if said else ''}", " ".join(command))
    return done.stdout.decode(errors="replace")


def _format_list(sites: list[Site]) -> str:
    rows = [("site", "scheduler", "GPUs/node", "founded", "verified", "")]
    for site in sites:
        queue = site.queues.get(site.queue, Queue())
        gpus = "ask" if queue.gpus is None else str(queue.gpus)
        rows.append((site.name, site.scheduler, gpus, site.standing, site.verified, site.summary))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "".join(
        "  ".join([*(f"{c:{w}}" for c, w in zip(row, widths, strict=False)), row[5]]).rstrip() + "\n" for row in rows
    )


def _format_site(site: Site) -> str:
    rows = [
        ("guide", site.guide),
        ("facts", f"{site.standing}, verified {site.verified}, from {site.file}"),
        *site_rows(site),
        *((f"source {key}", address) for key, address in site.sources.items()),
    ]
    width = max(len(key) for key, _ in rows)
    return f"{site.name}: {site.summary}\n" + "".join(f"  {key:{width}}  {value}\n" for key, value in rows)
