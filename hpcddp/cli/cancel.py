"""`hpcddp cancel`: end a run with all its jobs, gently or by the scheduler's own command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_messages
from hpcddp.login.cancel import cancel_runs
from hpcddp.login.find_run import find_runs

_DESCRIPTION = """\
End runs: jobs that wait are taken back, with those that would follow in a chain; a job that runs is asked to save and
stop, and --now ends it as the scheduler's own command does (scancel, qdel), which leaves it a grace before the kill.

RUN is a name below runs/, a run's folder, or the id of one of its jobs; of a sweep all jobs are ended."""


def build_parser() -> VerbParser:
    parser = VerbParser("cancel", _DESCRIPTION, example="hpcddp cancel train\nhpcddp cancel 1234 --now", exits=(2, 5))
    parser.usage = "hpcddp cancel RUN ... [--now]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a name, a folder or a job id")
    parser.add_argument(
        "--now", action="store_true", help="end what runs by the scheduler's own command; kill what runs here"
    )
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print what was done on stderr."""
    print_messages(cancel_runs(find_runs(args.runs), env, now=args.now))
    return 0
