"""`hpcddp completion SHELL`: verbs, options and their values, as shtab completes what the verbs' parsers have."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import write_exactly
from hpcddp.cli.verbs import VERBS
from hpcddp.errors import RequestError
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.script.site_file import site_files

_DESCRIPTION = """\
Print a script that completes verbs, options, sites, launchers and files. It lists the sites that exist when you run it.

For every new shell:  bash  hpcddp completion bash > ~/.local/share/bash-completion/completions/hpcddp
                      zsh   hpcddp completion zsh > FOLDER/_hpcddp     (FOLDER is one of $fpath, before compinit)
                      fish  hpcddp completion fish > ~/.config/fish/completions/hpcddp.fish
                      tcsh  hpcddp completion tcsh > ~/.hpcddp.tcsh    (and in ~/.tcshrc: source ~/.hpcddp.tcsh)"""
_SHELLS = ("bash", "zsh", "fish", "tcsh")
# Values that are files or folders, by the name of the parser's argument.
_FILES = {"job", "files", "runs", "run_dir", "recorded", "nodefile", "file", "data_dir"}

# The programs on PATH and files, as each shell finds them.
_COMMAND = {
    "bash": "_hpcddp_compgen_command",
    "zsh": "_files",
    "fish": "(complete -C (commandline -ct))",
    "tcsh": "c",
    "preamble": {"bash": '_hpcddp_compgen_command() { compgen -c -- "$1"; compgen -f -- "$1"; }'},
}


def build_parser() -> VerbParser:
    parser = VerbParser("completion", _DESCRIPTION, example='eval "$(hpcddp completion bash)"', exits=(2,))
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    write_exactly(complete(args.shell, tuple(site_files(env))) + "\n")
    return 0


def complete(shell: str, sites: tuple[str, ...]) -> str:
    """The completion script of one of bash, zsh, fish and tcsh. RequestError without shtab."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise RequestError("hpcddp completion needs shtab", "python -m pip install shtab") from None
    parser = argparse.ArgumentParser("hpcddp")
    parser.add_argument("--version", "-V", action="store_true", help="show the version")
    verbs = parser.add_subparsers(metavar="VERB")
    for verb, text in VERBS.items():
        built = importlib.import_module(f"hpcddp.cli.{verb}").build_parser()
        _name_values(built, verb, sites, shtab.FILE)
        if built.takes_command:
            command = built.add_argument("command", nargs=argparse.REMAINDER, help="a program and its words, behind --")
            command.complete = _COMMAND
        verbs.add_parser(verb, help=text, parents=[built], add_help=False)
    return shtab.complete(parser, shell)


def _name_values(parser: VerbParser, verb: str, sites: tuple[str, ...], file: object) -> None:
    """Give the parser's arguments the values that are known only here, for the completion alone."""
    words = {"site": sites, "launcher": JOB_LAUNCHERS, "verb": tuple(VERBS)}
    if verb == "sites":
        words["name"] = sites
    for action in parser._actions:
        if action.dest in words:
            action.choices = words[action.dest]
        elif action.dest in _FILES:
            action.complete = file  # type: ignore[attr-defined]  # shtab reads it
