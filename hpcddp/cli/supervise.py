"""`hpcddp supervise`: what a job script becomes. Standard library only: the ranks wait for its start."""

from __future__ import annotations

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import told_bytes
from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING
from hpcddp.supervisor.order import read_order
from hpcddp.supervisor.supervise import supervise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_DESCRIPTION = """\
Start a job's launcher and stay beside it: choose the run and hold it, queue the follow-up of a chain, keep the output,
pass signals on, end with the job's status. The last line of a job script calls it; `supervise: false` in the job file
leaves it out."""


def build_parser() -> VerbParser:
    """The options of `supervise`."""
    parser = VerbParser(
        "supervise",
        _DESCRIPTION,
        example="hpcddp render --site local -- python train.py | tail -n 4",
        exits=(2, 4),
        also={85: "the run is unfinished, and no job follows: submit the script again"},
        takes_command=True,
    )
    parser.usage = "hpcddp supervise [--script FILE] ORDER -- launcher [argument ...]"
    parser.add_argument("order", metavar="ORDER", help="request and plan, as `hpcddp render` writes them")
    parser.add_argument("--script", metavar="FILE", help="the job script, for the run folder and the chain")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The exit status of the job."""
    if not args.command:
        raise RequestError("there is no launcher to start", "hpcddp render prints the whole line")
    if not env.get("HPCDDP_RUN_DIR"):
        raise RequestError("HPCDDP_RUN_DIR is not set", "hpcddp render prints a script that sets it")
    return supervise(read_order(args.order), args.command, args.script or "", env, told_bytes)
