"""`hpcddp lint`: the mistakes in a job script that somebody wrote, before it is queued."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import listed
from hpcddp.cli.streams import print_answer
from hpcddp.errors import RequestError
from hpcddp.lint.rules import lint_python, lint_script, refuse_no_text
from hpcddp.lint.script import READERS, Finding, read_script, refuse_other_directives
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site_file import SiteChoice, open_site

_SCHEDULERS = listed([find_scheduler(name).title for name in READERS])
_DESCRIPTION = f"""\
Find known mistakes in job scripts for {_SCHEDULERS}, and in training scripts (.py). Nothing is run.
Each mistake comes with its line and with what hpcddp writes instead; docs/lint.md has them all, with the evidence."""


def build_parser() -> VerbParser:
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
    """Prints the findings, two lines each. 1 if there are any."""
    site = open_site(SiteChoice(args.site, "--site"), env) if args.site else None
    findings: list[Finding] = []
    for file in args.files:
        text = _read(file)
        refuse_no_text(file, text)  # before it is read as a script
        if file.endswith(".py"):
            findings += lint_python(file, text)
        else:
            refuse_other_directives(file, text)
            findings += lint_script(file, read_script(text, site, os.path.isdir))
    text = "".join(
        f"{f.file}:{f.line}: {f.rule} {f.kind}: {f.what}\n    hpcddp writes: {f.instead}\n" for f in findings
    )
    print_answer({"findings": [finding._asdict() for finding in findings]}, text, as_json=args.json, indent=1)
    return 1 if findings else 0


def _read(file: str) -> str:
    """Bytes that are not UTF-8 stay what they are, and line ends, too: a scheduler sees them."""
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return stream.read()
    except OSError as e:
        raise RequestError(f"{file} cannot be read: {e.strerror}", f"check the path: ls -l {file}") from e
