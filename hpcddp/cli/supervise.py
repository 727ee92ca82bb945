"""`hpcddp supervise`: what a job script becomes. Standard library only: the ranks wait for its start."""

from __future__ import annotations

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import message_bytes
from hpcddp.errors import RequestError
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import scheduler_names
from hpcddp.supervisor.order import read_order
from hpcddp.supervisor.supervise import supervise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_DESCRIPTION = """\
Start a job's launcher and stay beside it: choose the run and hold it, queue the follow-up of a chain, keep the output,
pass signals on, end with the job's status. The last line of a job script calls it, and its words may be changed there:
the job does what they say, and records it. `supervise: false` in the job file leaves it out."""


def build_parser() -> VerbParser:
    parser = VerbParser(
        "supervise",
        _DESCRIPTION,
        example="hpcddp render --site local -- python train.py | tail -n 4",
        exits=(2, 4),
        also={85: "the run is unfinished, and no job follows: submit the script again"},
        takes_command=True,
    )
    parser.usage = "hpcddp supervise [options] -- launcher [argument ...] hpcddp exec -- command [argument ...]"
    add = parser.add_argument_group("the job").add_argument
    add("--script", metavar="FILE", help="the job script, for the run folder and the chain")
    add("--scheduler", metavar="S", required=True, choices=scheduler_names(), help="whose job this is")
    add("--launcher", metavar="L", required=True, choices=JOB_LAUNCHERS, help="whose words the launcher's line has")
    add("--site", metavar="S", help="the site's name, for the records")
    add("--walltime", metavar="TIME", help="how long the ranks may run, where no scheduler ends them")
    add("--preflight", metavar="LINE", help="check the nodes first; what each has to run, for a shell (true)")
    add("--signal", metavar="TIME", help="how long before the end the ranks are warned")
    add = parser.add_argument_group("the run").add_argument
    add("--name", metavar="X", help="its name: the folder runs/X, or runs/X.7 for index 7 of an array")
    add("--run-dir", metavar="DIR", help="its folder, where that is another")
    add("--fresh", metavar="STAMP", help="begin anew, unless the run was begun with this stamp; set the old one aside")
    add("--resume", action="store_true", help="resume the run although it was begun with another command")
    add("--scratch", action="store_true", help="remove the run at the end; it must not be there before")
    add("--chain", metavar="N", help="jobs that may follow one another until the run is finished")
    more = "what the submit command needs for the next one, word by word"
    add("--submit-option", action="append", default=[], metavar="WORD", help=more)
    sweep = "a value of a placeholder of the command; once for each"
    add("--sweep", action="append", default=[], metavar="NAME=VALUE", help=sweep)
    add = parser.add_argument_group("when ranks or nodes are lost").add_argument
    add("--max-restarts", metavar="N", help="how often the ranks may be started again (never)")
    add("--fewer-nodes", metavar="2-3,6", help="on which smaller numbers of nodes they may be")
    add("--stall-limit", metavar="TIME", help="how long ranks may be silent or make no step (60s)")
    add = parser.add_argument_group("who is told").add_argument
    add("--notify", metavar="JSON", help="when and where to send notices: the keys of notify in a job file")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    if not args.command:
        raise RequestError("there is no launcher to start", "hpcddp render prints the whole line")
    return supervise(read_order(vars(args), args.command, env), args.script or "", env, message_bytes)
