"""`hpcddp render`: print the job script, and nothing else, on stdout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import read_plan, request_parser
from hpcddp.cli.streams import tell_each, write_exactly
from hpcddp.errors import RequestError
from hpcddp.login.planning import remark_start
from hpcddp.script.plan import JobPlan
from hpcddp.script.render import render_script

_DESCRIPTION = """\
Print the job script for a request. Pipe it to qsub, sbatch or bash, or keep it in a file.

What a site does not decide is asked for in a job file (docs/job-file.md) or by options; options win."""

_EXAMPLE = """\
hpcddp render --site abci3 --account GROUP --nodes 4 --walltime 2h -- python train.py | qsub
hpcddp render job.yaml --nodes 8 > job.sh
hpcddp render --demo --site local --ranks-per-node 2 | bash"""


def build_parser() -> VerbParser:
    """The options of `render`."""
    parser = request_parser("render", _DESCRIPTION, example=_EXAMPLE, exits=(2, 3, 5))
    check = parser.add_argument_group("what is checked").add_mutually_exclusive_group()
    # An option with a value that may be left out would take the job file for its value.
    for option, value, text in (
        ("--check", "here", "refuse paths that are not there, and a command that starts ranks itself (the default)"),
        ("--no-check", "no", "render without looking at files"),
        ("--check=live", "live", "also ask the scheduler, some by a held job that is deleted at once"),
    ):
        check.add_argument(option, dest="check", action="store_const", const=value, default="here", help=text)
    printed = parser.add_argument_group("what is printed")
    printed.add_argument("--interactive", action="store_true", help="also say what to type for a shell on these nodes")
    shown = printed.add_mutually_exclusive_group()
    shown.add_argument("--explain", action="store_true", help="show where each line came from; prints no job script")
    shown.add_argument("--diff", metavar="SITE2", help="show what changes on another site; prints no job script")
    printed.add_argument("--json", action="store_true", help="--explain or --diff as one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The script is whole before its first byte is printed: half a script would be a job."""
    if args.json and not (args.explain or args.diff):
        raise RequestError("--json goes with --explain or --diff: a job script is text", "hpcddp layout --json …")
    _refuse_unused(args)
    plan = read_plan(args, env)
    if args.check != "no":
        _check_plan(plan, env)
        tell_each(remark_start(plan, env))
    if args.explain:
        sys.stdout.write(_explained(plan, args.json))
    elif args.diff:
        sys.stdout.write(_compared(args, plan, env))
    else:
        text = render_script(plan)
        if args.check != "no":
            _check_script(plan, text, args.check == "live", env)
        if args.interactive:
            from hpcddp.script.render import interactive_command

            tell_each([f"for a shell on these nodes: {interactive_command(plan.site.scheduler, text)}"])
        write_exactly(text)
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    """RequestError for what would be dropped without a word, or taken for something else."""
    shown = "--explain" if args.explain else "--diff" if args.diff else ""
    of_script = "--interactive" if args.interactive else "--check=live" if args.check == "live" else ""
    if shown and of_script:
        raise RequestError(f"{of_script} goes with a job script, and {shown} prints none", f"leave out {of_script}")
    if args.job in {"live", "here"} and not os.path.exists(args.job):
        raise RequestError(f"{args.job} is no job file; the value of --check stands behind =", "--check=live")


def _check_plan(plan: JobPlan, env: Mapping[str, str]) -> None:
    from hpcddp.login.planning import look_here
    from hpcddp.script.file_check import check_plan

    tell_each(check_plan(plan, look_here(env)))


def _check_script(plan: JobPlan, text: str, live: bool, env: Mapping[str, str]) -> None:
    from hpcddp.login.planning import look_here
    from hpcddp.script.file_check import check_output

    tell_each(check_output(plan.site.scheduler, text, look_here(env)))
    if live:
        from hpcddp.schedulers.run import ask_scheduler

        tell_each([ask_scheduler(plan.site.scheduler, text, env)])


def _explained(plan: JobPlan, as_json: bool) -> str:
    from hpcddp.script.explain import explain_record, explain_script

    return _json(explain_record(plan)) if as_json else explain_script(plan)


def _compared(args: argparse.Namespace, plan: JobPlan, env: Mapping[str, str]) -> str:
    from hpcddp.script.explain import compare_plans, comparison_record

    if args.diff == plan.site.name:
        raise RequestError(f"--diff {args.diff} is the site itself", "--diff with another of: hpcddp sites")
    other = read_plan(argparse.Namespace(**{**vars(args), "site": args.diff}), env)
    both = (plan, render_script(plan)), (other, render_script(other))
    return _json(comparison_record(*both)) if args.json else compare_plans(*both)


def _json(value: object) -> str:
    import json

    return json.dumps(value) + "\n"
