"""`hpcddp verify -- python train.py`: whether a script trains the same on any number of ranks, and after a stop."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer, print_message
from hpcddp.errors import RequestError
from hpcddp.login.planning import on_path
from hpcddp.login.submit import clean_environment
from hpcddp.runs.command import identify_command
from hpcddp.runs.verified import record_verified
from hpcddp.units import parse_count, parse_walltime
from hpcddp.verify.report import format_verification, verification_record
from hpcddp.verify.trials import Plan, verify

_DESCRIPTION = """\
Run the first steps of a training script on 1, 2 and 3 ranks of this machine's CPU, stop it and resume it, and say
whether that is the same training: or the first step and tensor that differ, with the usual causes.

The script runs unchanged, in a copy of this folder, with few samples; nothing is saved."""


def build_parser() -> VerbParser:
    parser = VerbParser(
        "verify",
        _DESCRIPTION,
        example="hpcddp verify -- python train.py --lr 0.1",
        exits=(2, 4),
        also={0: "the same training", 1: "something differs, or the script failed"},
        takes_command=True,
    )
    parser.usage = "hpcddp verify [options] -- python train.py [argument ...]"
    parser.add_argument("--steps", metavar="N", default="8", help="optimizer steps of each run (8: two epochs)")
    parser.add_argument("--limit", metavar="TIME", default="10m", help="of all runs together (10m)")
    parser.add_argument("--global-batch", metavar="B", help="a smaller one than the script's, where a step takes long")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints the answer. 1 if something differs."""
    python, command = read_python(args.command, env)
    batch = None if args.global_batch is None else parse_count(args.global_batch, "--global-batch")
    steps = parse_count(args.steps, "--steps")
    plan = Plan(os.getcwd(), command, steps, parse_walltime(args.limit, "--limit"), batch)
    result = verify(plan, python, clean_environment(env), print_message)
    script = command[2] if command[1] == "-m" else command[1]
    record_verified(script, env)
    record, text = verification_record(script, result), format_verification(script, result)
    print_answer(record, text, as_json=args.json, indent=1)
    return 1 if result.differences else 0


def read_python(words: list[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter with its options, and the command without. RequestError for anything but a Python script."""
    if not words:
        raise RequestError("there is no command to run", "hpcddp verify -- python train.py")
    command = identify_command(words)
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(words[0])) is not None
    if not is_python or len(command) < 2 or command[1] in {"-c", "-"} or command[1:] == ("-m",):
        raise RequestError(
            f"hpcddp verify runs a Python script, got {' '.join(words)!r}", "hpcddp verify -- python train.py"
        )
    if command[1] != "-m" and not os.path.isfile(command[1]):
        raise RequestError(f"there is no script {command[1]}", "hpcddp verify -- python train.py")
    python = on_path(words[0], env)
    if python is None:
        raise RequestError(f"there is no {words[0]} on PATH", f"hpcddp verify -- {sys.executable} {command[1]}")
    return (python, *words[1 : len(words) - len(command) + 1]), command
