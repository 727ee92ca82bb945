"""`hpcddp status`: what became of runs, by their folders and the scheduler together."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer, print_messages
from hpcddp.errors import HpcddpError, RequestError
from hpcddp.login.find_cause import add_cause, send_notices
from hpcddp.login.find_run import find_runs
from hpcddp.login.judge import find_status
from hpcddp.login.status_text import format_statuses, status_record
from hpcddp.runs.folder import RUNS, RunFolder
from hpcddp.runs.usage import format_short, read_efficiency

_DESCRIPTION = """\
Say what became of runs: queued with its estimated start and the reason, running with step, loss, samples/s, time left
and walltime left, ended with why. A chain is one run, a sweep has its runs below it.

RUN is a name below runs/, a run's folder, or the id of one of its jobs; without one, all runs in runs/ are shown.
The scheduler is asked once, however many jobs there are; one that does not answer is said."""
_EVERY_S = 30.0
_LEAST_WIDTH = 40
_CLEAR = "\x1b[H\x1b[2J"


def build_parser() -> VerbParser:
    parser = VerbParser("status", _DESCRIPTION, example="hpcddp status\nhpcddp status train --watch", exits=(2,))
    parser.usage = "hpcddp status [RUN ...] [--json | --watch]"
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a name, a folder or a job id (all of runs/)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    shown.add_argument("--watch", action="store_true", help=f"again every {_EVERY_S:.0f} s, until all have ended")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The table on stdout, what could not be found out on stderr."""
    runs = find_runs(args.runs)
    if not runs and not args.json:
        raise RequestError(f"there are no runs in {RUNS}/", "hpcddp status FOLDER, or: hpcddp submit …")
    if args.watch:
        return _watch(args, env)
    found = find_status(runs, env)
    if len(found.runs) == 1:
        one = add_cause(runs[0], found.runs[0]) if found.runs[0].state == "failed" else found.runs[0]
        with suppress(HpcddpError, OSError):
            one = one._replace(used=format_short(read_efficiency(runs[0], reads_steps=False)))
        found = found._replace(runs=(one,))
    print_messages(found.problems)
    if found.is_damaged and len(found.runs) == 1:
        return RequestError.exit_code
    record = {"runs": [status_record(one) for one in found.runs], "problems": found.problems}
    print_answer(record, format_statuses(found.runs, time.time(), _width()), as_json=args.json)
    return RequestError.exit_code if found.is_damaged and args.runs else 0


def _watch(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the table until nothing lives any more: in place on a terminal; elsewhere when it changes."""
    before = ""
    while True:
        found = find_status(find_runs(args.runs), env)
        text = format_statuses(found.runs, time.time(), _width())
        if sys.stdout.isatty():
            sys.stdout.write(f"{_CLEAR}{time.strftime('%H:%M:%S')}  (Ctrl-C ends this, not the jobs)\n\n{text}")
            print_messages(found.problems)
        elif text != before:
            print_messages(found.problems)
            sys.stdout.write(text)
        sys.stdout.flush()
        for one in found.runs:
            print_messages(send_notices(RunFolder(one.path), one, env))
        before = text
        if not any(one.lives for one in found.runs):
            return 0
        time.sleep(_EVERY_S)


def _width() -> int:
    """Characters of a line: the terminal's, else as many as any has."""
    return max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
