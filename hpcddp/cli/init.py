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
from hpcddp.errors import HpcddpError, RequestError
from hpcddp.login.planning import find_site_here, plan_request
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.plan import list_missing
from hpcddp.script.site_file import SiteChoice, chosen_site, open_site
from hpcddp.script.spec import read_spec

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
    parser.elsewhere["--force"] = f"a file that is there stays: edit it, or: mv {DEFAULT_JOB_FILE} old.yaml"
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
        choice = _ask_site(choice, env)
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
        such = f", such as {rule.example}" if rule.example else ""
        question = f"account that pays for the jobs{such}" if rule.required else "account (Return: none)"
        if "account" not in given and (account := _ask(question, "", needed=rule.required)):
            given["account"] = account, _ANSWER
        for one in list_missing(read_spec(given, site.vars), site, cpus_known=scheduler.this_machine):
            key, example = _key_of(one.option, one.example)
            given[key] = _ask(f"{one.what}, such as {example}", ""), _ANSWER
    plan = plan_request(given, choice, env)  # the errors of a request come before anything is written
    _write(given)
    print_messages(plan.remarks)
    queue_it = f"hpcddp render --nodes 4 | {next(iter(scheduler.commands.submit), 'bash')}"
    print_message(f"next: hpcddp layout --nodes 4, then {queue_it} or hpcddp submit --nodes 4")
    print(DEFAULT_JOB_FILE)
    return 0


def _key_of(option: str, example: str) -> tuple[str, str]:
    """A job file's key, and an example of its value, from what `list_missing` says to type."""
    if option == "--set":
        key, _, value = example.partition("=")
        return key, value
    return option.removeprefix("--").replace("-", "_"), example


def _ask(question: str, found: str, *, needed: bool = True) -> str:
    """The answer, or what was found where it is empty. Asks again where one is needed and there is neither."""
    while True:
        print(f"{question}{f' [{found}]' if found else ''}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise RequestError(f"there was no answer to: {question}", "hpcddp init --help, for the options")
        if line.strip() or found or not needed:
            return line.strip() or found


def _ask_site(found: SiteChoice, env: Mapping[str, str]) -> SiteChoice:
    """The first answer that is a site."""
    print(f"({found.reason}; hpcddp sites lists all)", file=sys.stderr)
    while True:
        name = _ask("site", found.site)
        choice = found if name == found.site else SiteChoice(name, _ANSWER)
        try:
            open_site(choice, env)
        except HpcddpError as error:
            print_message(str(error))
        else:
            return choice


def _write(given: Mapping[str, tuple[object, str]]) -> None:
    import yaml

    order = ("site", "account", "nodes", "walltime", "command")
    keys = sorted(given, key=lambda key: (order.index(key) if key in order else 3.5, key))
    values: dict[str, object] = {}
    for key in keys:
        value = given[key][0]
        if isinstance(value, list):
            value = shlex.join(value)  # of a command
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        group, dot, name = key.partition(".")  # env.NAME, sweep.NAME
        if dot:
            inner = values.setdefault(group, {})
            assert isinstance(inner, dict)
            inner[name] = value
        else:
            values[key] = value
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    try:
        with open(DEFAULT_JOB_FILE, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RequestError(
            f"./{DEFAULT_JOB_FILE} cannot be written: {(error.strerror or str(error)).lower()}",
            "cd to the folder of your training script",
        ) from error
