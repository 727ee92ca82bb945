"""`hpcddp render`: print the job script, and nothing else, on stdout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import read_plan, request_parser
from hpcddp.errors import RequestError
from hpcddp.script.plan import JobPlan
from hpcddp.script.render import render_script

_DESCRIPTION = """\
Print the job script for a request. Pipe it to qsub, sbatch or bash, or keep it in a file.

What a site does not decide is asked for in a job file (docs/job-file.md) or by options; options win."""


def build_parser() -> VerbParser:
    """The options of `render`."""
    parser = request_parser("render", _DESCRIPTION)
    check = parser.add_mutually_exclusive_group()
    # An option with a value that may be left out would take the job file for its value.
    for option, value, text in (
        ("--check", "here", "refuse paths that are not there, and a command that starts ranks itself (the default)"),
        ("--no-check", "no", "render without looking at files"),
        (
            "--check=live",
            "live",
            "also ask the scheduler: sbatch --test-only, or a held PBS job, deleted at once",
        ),
    ):
        check.add_argument(option, dest="check", action="store_const", const=value, default="here", help=text)
    parser.add_argument("--interactive", action="store_true", help="also say what to type for a shell on these nodes")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--explain", action="store_true", help="show where each line came from; prints no job script")
    shown.add_argument("--diff", metavar="SITE2", help="show what changes on another site; prints no job script")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The script is whole before its first byte is printed: half a script would be a job."""
    plan = read_plan(args, env)
    if args.check != "no":
        _check_plan(plan)
    if args.explain:
        text = _explained(args, plan)
    elif args.diff:
        text = _compared(args, plan, env)
    else:
        text = render_script(plan)
        if args.check != "no":
            _check_script(plan, text, args.check == "live", env)
        if args.interactive:
            from hpcddp.script.interactive import interactive_command

            _tell([f"for a shell on these nodes: {interactive_command(plan.site.scheduler, text)}"])
    sys.stdout.write(text)
    return 0


def _check_plan(plan: JobPlan) -> None:
    from hpcddp.script.preflight import Here, check_plan

    _tell(check_plan(plan, Here(os.getcwd(), os.path.exists)))


def _check_script(plan: JobPlan, text: str, live: bool, env: Mapping[str, str]) -> None:
    from hpcddp.script.preflight import Here, check_output

    _tell(check_output(text, Here(os.getcwd(), os.path.exists)))
    if live:
        from hpcddp.scheduler.run import ask_scheduler

        _tell([ask_scheduler(plan.site.scheduler, text, env)])


def _explained(args: argparse.Namespace, plan: JobPlan) -> str:
    from hpcddp.cli.request import read_asked
    from hpcddp.script.explain import explain_script

    return explain_script(plan, {key: where for key, (_, where) in read_asked(args)[0].items()})


def _compared(args: argparse.Namespace, plan: JobPlan, env: Mapping[str, str]) -> str:
    from hpcddp.script.compare import compare_plans

    if args.diff == plan.site.name:
        raise RequestError(f"--diff {args.diff} is the site itself", "--diff with another of: hpcddp sites")
    other = read_plan(argparse.Namespace(**{**vars(args), "site": args.diff}), env)
    return compare_plans((plan, render_script(plan)), (other, render_script(other)))


def _tell(remarks: list[str]) -> None:
    for remark in remarks:
        print(f"hpcddp: {remark}", file=sys.stderr)
