"""`hpcddp compare`: whether two runs are the same to the last bit, and if not, since when and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.history.compare import compare_runs
from hpcddp.history.record import read_run
from hpcddp.history.report import comparison_record, format_comparison

_DESCRIPTION = """\
Say whether two runs are the same to the last bit: every loss, and the SHA-256 of the weights where both recorded it.
If they are not: from which step on, by how much, what differed between them, and what of it can explain it.

Exit status: 0 the same, as far as both go; 1 different; 2 a folder or file cannot be read as a run."""


def build_parser() -> VerbParser:
    """`RUN RUN [--json]`."""
    parser = VerbParser("compare", _DESCRIPTION)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder, such as runs/digits")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """Prints the comparison. 1 if the runs differ."""
    if args.command:
        raise RequestError(
            f"hpcddp compare takes no command after --, got {args.command[0]!r}", "hpcddp compare --help"
        )
    result = compare_runs(*(read_run(folder) for folder in args.runs))
    if args.json:
        print(json.dumps(comparison_record(result), indent=1))
    else:
        sys.stdout.write(format_comparison(result))
    return 0 if result.is_same else 1
