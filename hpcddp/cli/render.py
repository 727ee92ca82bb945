"""`hpcddp render`: print the job script, and nothing else, on stdout."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import read_plan, request_parser
from hpcddp.cli.streams import print_messages, write_exactly
from hpcddp.login.planning import remark_start
from hpcddp.script.file_check import check_output, check_plan
from hpcddp.script.render import render_script

_DESCRIPTION = """\
Print the job script for a request. Pipe it to qsub, sbatch or bash, or keep it in a file.

What a site does not decide is asked for in a job file (docs/job-file.md) or by options; options win."""

_EXAMPLE = """\
hpcddp render --site abci3 --account GROUP --nodes 4 --walltime 2h -- python train.py | qsub
hpcddp render job.yaml --nodes 8 > job.sh
hpcddp render --demo --site local --ranks-per-node 2 | bash"""


def build_parser() -> VerbParser:
    parser = request_parser("render", _DESCRIPTION, example=_EXAMPLE, exits=(2, 3))
    printed = parser.add_argument_group("what is printed")
    printed.add_argument("--no-check", action="store_true", help="render without looking at files")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The script is whole before its first byte is printed: half a script would be a job."""
    plan = read_plan(args, env)
    if not args.no_check:
        print_messages(check_plan(plan, env.get("PATH", "")))
        print_messages(remark_start(plan))
    text = render_script(plan)
    if not args.no_check:
        print_messages(check_output(plan.site.scheduler, text))
    write_exactly(text)
    return 0
