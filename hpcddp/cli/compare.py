"""`hpcddp compare`: whether two runs are the same to the last bit, and if not, where they differ first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer
from hpcddp.runs.compare import compare_runs, format_comparison, read_run

_DESCRIPTION = """\
Say whether two runs are the same to the last bit: every loss, and the SHA-256 of the weights where both recorded it.
If they differ: the first step where they do, and by how much."""


def build_parser() -> VerbParser:
    parser = VerbParser(
        "compare",
        _DESCRIPTION,
        example="hpcddp compare runs/one runs/two",
        exits=(2,),
        also={0: "the same, as far as both go", 1: "different"},
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder, such as runs/digits")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """Prints the comparison. 1 if the runs differ."""
    result = compare_runs(*(read_run(folder) for folder in args.runs))
    print_answer(result._asdict(), format_comparison(result), as_json=args.json, indent=1)
    return 0 if result.is_same else 1
