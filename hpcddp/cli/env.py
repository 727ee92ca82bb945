"""`hpcddp env`: this process's place among the ranks, and how it is known."""

from __future__ import annotations

import os
import sys

from hpcddp.cli.parser import VerbParser
from hpcddp.ranks.rankinfo import NUMBERS
from hpcddp.ranks.record import TYPE_CHECKING
from hpcddp.ranks.rendezvous import Rendezvous, find_rendezvous
from hpcddp.ranks.resolve import find_place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hpcddp.ranks.rankinfo import RankInfo


def build_parser() -> VerbParser:
    """The options of `hpcddp env`."""
    parser = VerbParser("env", "Say which rank this process is, where rank 0 is, and how that is known.")
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object; null where the environment cannot tell")
    add("--from", dest="recorded", metavar="FILE", help="read a recorded environment: output of `env` or `env -0`")
    add("--nodefile", metavar="FILE", help="the allocation's hosts, instead of the file that the environment names")
    add("--hostname", metavar="NAME", help="the host's name (default: this host's; with --from: unknown)")
    add("--explain", action="store_true", help="show every candidate, chosen or rejected, and why")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the place. LaunchError (4) if this is no rank, or if the environment contradicts itself."""
    live = args.recorded is None
    hostname = args.hostname
    if live:
        hostname = hostname or os.uname().nodename
    else:
        from hpcddp.ranks.recorded import read_environment

        env = read_environment(args.recorded)
    if args.explain:
        return _explain(env, hostname, args.nodefile, live=live, as_json=args.json)
    values, source, (info, meeting) = look(env, hostname, args.nodefile, live=live)
    if args.json:
        import json

        print(json.dumps({**values, "source": source}))
        return 0
    _print_table(values, source, meeting.remarks)
    if info is not None and info.launcher != "none":
        _print_checks(env, info, meeting, live=live)
    return 0


def look(
    env: Mapping[str, str], hostname: str | None, nodefile: str | None, *, live: bool
) -> tuple[dict[str, int | str | None], dict[str, str], tuple[RankInfo | None, Rendezvous]]:
    """The printed values by name, the source of each, and the rank and rendezvous that they came from."""
    place = find_place(env, hostname=hostname, nodefile=nodefile, live=live)
    info = place.info()
    meeting = Rendezvous(None, None, {})
    if info is not None:
        meeting = find_rendezvous(env, info, hostname=hostname, nodefile=nodefile, live=live, strict=False)
    values = {"launcher": place.launcher, **{number: place.numbers[number] for number in NUMBERS}}
    values |= {"master_addr": meeting.master_addr, "master_port": meeting.master_port}
    return values, {**place.source, **meeting.source}, (info, meeting)


def _print_table(values: Mapping[str, int | str | None], source: Mapping[str, str], remarks: tuple[str, ...]) -> None:
    if values["launcher"] == "none":
        print(f"a single process, rank 0 of 1: {source['launcher']}")
        return
    for key, value in values.items():
        print(f"{key:17} {'-' if value is None else value!s:17} {source.get(key, 'the environment does not say')}")
    for remark in remarks:
        print(f"note: {remark}")


def _print_checks(env: Mapping[str, str], info: RankInfo, meeting: Rendezvous, *, live: bool) -> None:
    """On stderr, what else is wrong with this rank's job. Of a recorded environment only what its variables show."""
    from hpcddp.checks.check import Machine
    from hpcddp.checks.environment import run_checks
    from hpcddp.checks.machine import look_at_machine

    for check in run_checks(env, info, meeting, look_at_machine(env) if live else Machine()):
        print(f"warning: {check}", file=sys.stderr)


def _explain(env: Mapping[str, str], hostname: str | None, nodefile: str | None, *, live: bool, as_json: bool) -> int:
    from hpcddp.ranks.explain import explain, format_explanation

    found = explain(env, hostname=hostname, nodefile=nodefile, live=live)
    if as_json:
        import json

        error = found.error and {"message": found.error.message, "hint": found.error.hint}
        findings = [finding._asdict() for finding in found.findings]
        print(json.dumps({"findings": findings, "remarks": found.remarks, "error": error}))
    else:
        print(format_explanation(found))
    if found.error is not None:
        raise found.error
    return 0
