"""`hpcddp init`: asks which site, which account and which script, and writes ./hpcddp.yaml."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import DEFAULT_JOB_FILE, named_site, read_keys, request_parser
from hpcddp.cli.streams import print_message, print_messages
from hpcddp.errors import RequestError
from hpcddp.login.planning import find_site_here, plan_request
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site_file import SiteChoice, chosen_site, open_site

_DESCRIPTION = f"""\
Ask which site, which account and which script, and write ./{DEFAULT_JOB_FILE}: what you type afterwards needs no more.
What this machine says is offered in brackets (Return takes it); what an option says is not asked for."""
_EXAMPLE = """\
hpcddp init
hpcddp init --site abci3 --account GROUP -- python train.py --epochs 90
hpcddp render --nodes 4 | qsub"""
_ANSWER = "your answer"  # the source of a value


def build_parser() -> VerbParser:
    """The options of `render`: each is a line of the job file."""
    parser = request_parser("init", _DESCRIPTION, example=_EXAMPLE, exits=(2, 3))
    parser.usage = "hpcddp init [options] [-- command ...]"
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Writes the file, whole and valid, or nothing; prints its name."""
    if args.job or args.demo or args.fresh:
        word = args.job or ("--demo" if args.demo else "--fresh")
        raise RequestError(f"hpcddp init writes {DEFAULT_JOB_FILE}, and got {word}", "hpcddp init -- python train.py")
    if os.path.lexists(DEFAULT_JOB_FILE):
        raise RequestError(f"./{DEFAULT_JOB_FILE} is there already", f"edit it, or: mv {DEFAULT_JOB_FILE} old.yaml")
    given, _ = read_keys(args)
    asks = sys.stdin.isatty() and sys.stderr.isatty()
    choice = chosen_site(named_site(args), None, "", env) or find_site_here(env)
    if "site" not in given and asks:
        print(f"({choice.reason}; hpcddp sites lists all)", file=sys.stderr)
        name = _ask("site", choice.site)
        choice = choice if name == choice.site else SiteChoice(name, _ANSWER)
    site = open_site(choice, env)
    in_file = os.path.abspath(site.file) if os.path.basename(choice.site) != choice.site else site.name
    given["site"] = in_file, choice.reason
    scheduler = find_scheduler(site.scheduler)
    if "command" not in given:
        found = "python train.py" if os.path.isfile("train.py") else ""
        words = shlex.split(_ask("the command that trains", found) if asks else found)
        if words:
            given["command"] = ["python", *words] if words[0].endswith(".py") else words, _ANSWER
    if asks:
        rule = site.account
        question = "account that pays for the jobs" if rule.required else "account (Return: none)"
        if "account" not in given and (account := _ask(question, "", needed=rule.required)):
            given["account"] = account, _ANSWER
    plan = plan_request(given, choice, env)  # the errors of a request come before anything is written
    _write(given)
    print_messages(plan.remarks)
    queue_it = f"hpcddp render --nodes 4 | {next(iter(scheduler.commands.submit), 'bash')}"
    print_message(f"next: hpcddp layout --nodes 4, then {queue_it} or hpcddp submit --nodes 4")
    print(DEFAULT_JOB_FILE)
    return 0


def _ask(question: str, found: str, *, needed: bool = True) -> str:
    """The answer, or what was found where it is empty. Asks again where one is needed and there is neither."""
    while True:
        print(f"{question}{f' [{found}]' if found else ''}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise RequestError(f"there was no answer to: {question}", "hpcddp init --help, for the options")
        if line.strip() or found or not needed:
            return line.strip() or found


def _write(given: Mapping[str, tuple[object, str]]) -> None:
    import yaml

    values: dict[str, object] = {}
    for key in sorted(given, key=lambda key: (key == "command", key != "site")):
        value = given[key][0]
        if isinstance(value, list):
            value = shlex.join(value)  # of a command
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        values[key] = value
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    with open(DEFAULT_JOB_FILE, "x", encoding="utf-8") as file:
        file.write(text)
