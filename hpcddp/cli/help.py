"""`hpcddp help [VERB]`: the verbs, or the options of one."""

from __future__ import annotations

from hpcddp.cli.main import VERBS
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import write_help
from hpcddp.cli.verbs import format_verbs, unknown_verb

TYPE_CHECKING = False  # mypy knows the name; importing typing would cost more than the help
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def build_parser() -> VerbParser:
    """`[VERB]`."""
    parser = VerbParser("help", "Show the verbs, or the options of one verb.", example="hpcddp help render", exits=(2,))
    parser.add_argument("verb", nargs="?", metavar="VERB", help="the same as hpcddp VERB --help")
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """Prints the help."""
    if args.verb is None:
        write_help(format_verbs())
        return 0
    if args.verb not in VERBS:
        raise unknown_verb([args.verb])
    import importlib

    importlib.import_module(f"hpcddp.cli.{args.verb}").build_parser().print_help()
    return 0
