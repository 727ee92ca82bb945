"""`hpcddp lint`: the mistakes in a job script that somebody wrote, before it is queued."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import listed
from hpcddp.errors import RequestError
from hpcddp.lint.equivalent import SameJob, same_job, same_job_where_the_queue_is
from hpcddp.lint.rules import lint_python, lint_script, refuse_no_text
from hpcddp.lint.script import READERS, Finding, Script, read_script, refuse_other_directives, unix_lines
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site import Site
from hpcddp.script.site_file import SiteChoice, open_site, site_files

_SCHEDULERS = listed([find_scheduler(name).title for name in READERS])
_DESCRIPTION = f"""\
Find known mistakes in job scripts for {_SCHEDULERS}, and in training scripts (.py). Nothing is run.
Each mistake comes with its line and with what hpcddp writes instead; docs/lint.md has them all, with the evidence."""


def build_parser() -> VerbParser:
    """`FILE ... [--site S] [--json]`."""
    parser = VerbParser(
        "lint",
        _DESCRIPTION,
        example="hpcddp lint --site abci3 job.sh train.py",
        exits=(2, 3),
        also={0: "nothing found", 1: "something found"},
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a job script or a .py file; - is standard input")
    parser.add_argument("--site", metavar="S", help="the site it is for, with its limits and rules")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints the findings. 1 if there are any."""
    site = open_site(SiteChoice(args.site, "--site"), env) if args.site else None
    findings: list[Finding] = []
    renders: list[SameJob] = []
    for file in args.files:
        text = _read(file)
        refuse_no_text(file, text)  # before it is read as a script
        if file.endswith(".py"):
            findings += lint_python(file, text)
            continue
        refuse_other_directives(file, text)
        script = read_script(text, site, os.path.isdir)
        found = lint_script(file, script)
        if found:
            readable = script if "\r" not in text else read_script(unix_lines(text), site, os.path.isdir)
            renders.append(choose_same_job(readable, site, env))
        findings += found
    if args.json:
        same = [
            {"command": one.line, "examples": list(one.examples), "not_in_the_line": list(one.left_out)}
            for one in renders
            if one.line
        ]
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "same_job": same}, indent=1))
    else:
        sys.stdout.write(format_findings(findings, renders))
    return 1 if findings else 0


def format_findings(findings: list[Finding], renders: list[SameJob]) -> str:
    """Two lines each, then the request that renders the same job."""
    text = "".join(
        f"{f.file}:{f.line}: {f.rule} {f.kind}: {f.what}\n    hpcddp writes: {f.instead}\n" for f in findings
    )
    for one in renders:
        if one.queue:
            text += (
                f"queue {one.queue} is site {one.site}'s: hpcddp lint --site {one.site} checks that site's rules, too\n"
            )
        text += f"the same job: {one.line}\n" if one.line else ""
        text += "".join(f"    not in the line: {what}\n" for what in one.left_out)
        text += f"    the script does not say these, change them: {', '.join(one.examples)}\n" if one.examples else ""
    return text


def choose_same_job(script: Script, site: Site | None, env: Mapping[str, str]) -> SameJob:
    """Without --site, for the only known site that has the script's queue; else for the scheduler's generic one, whose
    file says what has to be given."""
    at_queue = None if site else same_job_where_the_queue_is(script, site_files(env))
    return at_queue or same_job(script, site or open_site(SiteChoice(script.generic_site, "lint"), env))


def _read(file: str) -> str:
    """Bytes that are not UTF-8 stay what they are, and line ends, too: a scheduler sees them."""
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return stream.read()
    except OSError as e:
        raise RequestError(f"{file} cannot be read: {e.strerror}", f"check the path: ls -l {file}") from e
