"""`hpcddp completion SHELL`: completion of verbs, options and their values, made from the verbs' own parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping

from hpcddp.cli.completion_scripts import FILES, Completion, VerbCompletions, format_bash, format_fish, format_zsh
from hpcddp.cli.main import VERBS
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import write_exactly
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.script.find_site import site_files

_DESCRIPTION = """\
Print a script that completes verbs, options, sites, launchers and files. It lists the sites that exist when you run it.

For every new shell:  bash  hpcddp completion bash > ~/.local/share/bash-completion/completions/hpcddp
                      zsh   hpcddp completion zsh > FOLDER/_hpcddp     (FOLDER is one of $fpath, before compinit)
                      fish  hpcddp completion fish > ~/.config/fish/completions/hpcddp.fish"""
_SHELLS = {"bash": format_bash, "zsh": format_zsh, "fish": format_fish}
# Values that are files or folders, by the name of the parser's argument.
_FILES = {"job", "files", "runs", "run_dir", "recorded", "nodefile", "file", "data_dir"}


def build_parser() -> VerbParser:
    """`SHELL`."""
    parser = VerbParser("completion", _DESCRIPTION, example='eval "$(hpcddp completion bash)"', exits=(2,))
    parser.add_argument("shell", choices=tuple(_SHELLS), metavar="SHELL", help="bash, zsh or fish")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints the script."""
    write_exactly(_SHELLS[args.shell](describe_verbs(tuple(site_files(env)))))
    return 0


def describe_verbs(sites: tuple[str, ...]) -> list[VerbCompletions]:
    """What can be typed behind each verb, read from its parser."""
    words = {"site": sites, "diff": sites, "launcher": JOB_LAUNCHERS, "verb": tuple(VERBS)}
    words |= {"action": ("show", "page", "check", "new", "schema"), "name": sites}
    return [
        VerbCompletions(verb, text, parser.takes_command, tuple(_describe(parser._actions, verb, words)))
        for verb, text in VERBS.items()
        for parser in [importlib.import_module(f"hpcddp.cli.{verb}").build_parser()]
    ]


def _describe(
    actions: Iterable[argparse.Action], verb: str, words: Mapping[str, tuple[str, ...]]
) -> Iterable[Completion]:
    for action in actions:
        values = tuple(map(str, action.choices or ()))
        if action.dest in words and not (action.dest == "name" and verb != "sites"):
            values = words[action.dest]
        elif action.dest in _FILES:
            values = FILES
        text = (action.help or str(action.metavar)).replace("%%", "%")  # argparse's help texts have % twice
        yield Completion(tuple(action.option_strings), action.nargs != 0, values, text)
