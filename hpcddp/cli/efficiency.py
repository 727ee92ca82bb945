"""`hpcddp efficiency`: what runs have used of what they had, and what to ask for next time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer
from hpcddp.errors import RequestError
from hpcddp.login.find_run import find_run, format_run
from hpcddp.runs.usage import efficiency_record, format_efficiency, read_efficiency

_DESCRIPTION = """\
Say what a run has used of what it had: node-hours, those lost, where the time went, GPUs, CPUs, memory, samples/s; and
what to ask for next time, as words to type. Of any program; of a run that failed or was killed, too.

RUN is a name below runs/, a run's folder, or the id of one of its jobs. Each node's use is in its attempts' folders,
written every ten seconds while it ran."""


def build_parser() -> VerbParser:
    parser = VerbParser("efficiency", _DESCRIPTION, example="hpcddp efficiency train", exits=(2,))
    parser.usage = "hpcddp efficiency RUN [--json]"
    parser.add_argument("run", metavar="RUN", help="a name, a folder or a job id")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """The facts on stdout. RequestError of a run that has not begun."""
    run = find_run(args.run)
    found = read_efficiency(run)
    if not found.attempts:
        raise RequestError(f"no job of {run.path} has begun", f"hpcddp status {format_run(run)}")
    print_answer(efficiency_record(found), format_efficiency(found), as_json=args.json)
    return 0
