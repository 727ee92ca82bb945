"""`hpcddp env`: this process's place among the ranks, and how it is known."""

from __future__ import annotations

import os
import sys

from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.rendezvous import Rendezvous
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hpcddp.checks.environment import Check


def build_parser() -> VerbParser:
    parser = VerbParser(
        "env",
        "Say which rank this process is, where rank 0 is, and how that is known.",
        example="hpcddp env\nhpcddp env --from rank.env --hostname node2",
        exits=(2, 4),
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object; null where the environment does not say")
    add("--from", dest="recorded", metavar="FILE", help="read a recorded environment: output of `env` or `env -0`")
    add("--nodefile", metavar="FILE", help="the allocation's hosts, instead of the file that the environment names")
    add("--hostname", metavar="NAME", help="the host's name (default: this host's; with --from: unknown)")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the place. LaunchError (4) if this is no rank, or if the environment contradicts itself."""
    live, hostname = args.recorded is None, args.hostname
    if live:
        hostname = hostname or os.uname().nodename
    else:
        env = read_environment(args.recorded)
    launch = Launch(env, hostname, args.nodefile, live=live, strict=False)
    values, source = read_values(launch)
    remarks, warnings = launch.place.remarks, []
    if launch.place.info() is not None:
        remarks, warnings = (*remarks, *launch.rendezvous.remarks), _check(launch)
    if args.json:
        import json

        found = [check._asdict() for check in warnings]
        print(json.dumps({**values, "source": source, "notes": remarks, "warnings": found}))
        return 0
    _print_table(values, source, remarks)
    for check in warnings:
        print(f"warning: {check}", file=sys.stderr)
    return 0


def read_environment(path: str) -> dict[str, str]:
    """The variables in this file, the output of `env -0`, or of `env`: of a value of several lines the first one.

    RequestError if it cannot be read, or holds no variable.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {(error.strerror or '').lower()}", f"ls -l {path}") from None
    entries = (entry.partition("=") for entry in text.split("\0" if "\0" in text else "\n"))
    env = {name: value for name, equals, value in entries if equals and name.replace("_", "a").isalnum()}
    if not env:
        raise RequestError(f"{path} holds no variable", f"record it in another file: env -0 > {path}.new")
    return env


def read_values(launch: Launch) -> tuple[dict[str, int | str | None], dict[str, str]]:
    """The printed values by name, and the source of each."""
    place = launch.place
    found = Rendezvous(None, None, {}) if place.info() is None else launch.rendezvous
    values = {"launcher": place.launcher, **{number: place.numbers[number] for number in NUMBERS}}
    values |= {"master_addr": found.master_addr, "master_port": found.master_port}
    return values, {**place.source, **found.source}


def _print_table(values: Mapping[str, int | str | None], source: Mapping[str, str], remarks: tuple[str, ...]) -> None:
    if values["launcher"] == "none":
        print(f"a single process, rank 0 of 1: {source['launcher']}")
        return
    for key, value in values.items():
        print(f"{key:17} {'-' if value is None else value!s:17} {source.get(key, 'the environment does not say')}")
    for remark in remarks:
        print(f"note: {remark}")


def _check(launch: Launch) -> list[Check]:
    """Check the rest of this rank's job; of a recorded environment only what its variables show."""
    from hpcddp.checks.environment import Machine, describe_machine, run_checks

    return run_checks(launch.env, launch.info, describe_machine() if launch.live else Machine())
