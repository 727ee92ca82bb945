"""`hpcddp submit`: render, queue, and leave script, plan and job id in the run's folder. Prints the id alone."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import named_site, read_keys, request_parser
from hpcddp.cli.streams import print_message, print_messages, write_exactly
from hpcddp.login.planning import choose_site, read_request, this_process
from hpcddp.login.submit import Parts, check_parts, list_unverified, plan_parts, submit_parts
from hpcddp.schedulers.registry import find_scheduler

_DESCRIPTION = """\
Render the job script, hand it to the scheduler, and make the run's folder with script, plan and job id.

stdout has the job's id alone, one line for each job. A sweep of the job file is one array, or one job for each
value; on a machine without a scheduler (site local) jobs run in the background, one after another."""

_EXAMPLE = """\
hpcddp submit job.yaml --nodes 4
hpcddp submit --site abci3 --account GROUP --nodes 4 --walltime 2h -- python train.py
hpcddp submit eval.yaml --after train"""


def build_parser() -> VerbParser:
    parser = request_parser("submit", _DESCRIPTION, example=_EXAMPLE, exits=(2, 3, 5))
    queued = parser.add_argument_group("how it is queued")
    queued.add_argument(
        "--after", metavar="JOB", help="start when this job, or run, has ended well (afterany:JOB: ended)"
    )
    queued.add_argument("--array", metavar="1-10", help="one job for each index, each with a run of its own")
    queued.add_argument("--chain", metavar="N", help="at most N jobs, each of which resumes the one before")
    queued.add_argument("--hold", action="store_true", help="it waits until somebody releases it")
    queued.add_argument("--dry-run", action="store_true", help="print the script, and what would be done with it")
    queued.add_argument("--no-check", action="store_true", help="do not look whether files and folders are there")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Everything is planned and checked before anything is written or queued."""
    given, job_file = read_keys(args)
    for key, option in (("after", "dependency"), ("array", "array"), ("chain", "chain")):
        if getattr(args, key) is not None:
            given[option] = ([getattr(args, key)] if key == "after" else getattr(args, key), f"--{key}")
    if args.hold:
        given["hold"] = ("true", "--hold")
    spec, site, remarks = read_request(given, choose_site(given, named_site(args), job_file, env), env)
    print_messages(remarks)
    parts = plan_parts(spec, site, env, this_process())
    print_messages(parts.remarks)
    if not args.no_check:
        print_messages(check_parts(parts, env))
    if args.dry_run:
        _show(parts)
        return 0
    queued = submit_parts(parts, env)
    print_messages(list_unverified(parts, env))
    for one, part in zip(queued, parts.parts, strict=True):
        print_message(str(part))
        write_exactly(f"{one.job}\n")
    where = parts.sweep or parts.parts[0].run
    print_message(f"hpcddp status {shlex.quote(os.path.relpath(where.path))} shows what becomes of it")
    return 0


def _show(parts: Parts) -> None:
    for part in parts.parts:
        words = find_scheduler(part.plan.site.scheduler).commands.hand_in or ("bash",)
        command = " ".join(word for word in words if not word.startswith("{"))
        print_message(f"{command} would get this script; {part}")
        write_exactly(part.script)
