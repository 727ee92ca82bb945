"""`hpcddp train`: the options of the reference trainer. No torch here, so that `--help` is quick."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from functools import partial

from hpcddp.batchplan import EXACT_METHODS
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_message
from hpcddp.errors import find_missing_library
from hpcddp.units import parse_count, read_number

# Options with a whole number of 1 or more: the usual one, and what it is.
_COUNTS = (
    ("--epochs", 6, "passes over the data (default 6)"),
    ("--global-batch", None, "samples per optimizer step over all ranks (default: the job plan's, else 64)"),
    ("--max-micro-batch", None, "most samples per forward pass of one rank"),
    ("--image-size", 32, "side of the images in pixels (default 32)"),
    ("--limit-steps", None, "stop after N steps; the next start resumes"),
)


def build_parser() -> VerbParser:
    parser = VerbParser(
        "train",
        "Train a torchvision model on handwritten digits; run it on every rank (hpcddp launch, or a rendered job).",
        example="hpcddp train --epochs 5\nhpcddp launch --ranks-per-node 2 -- hpcddp train --global-batch 64",
        exits=(2, 4),
        also={85: "training stopped in time: unfinished"},
    )
    what = parser.add_argument_group("training")
    what.add_argument("--model", default="resnet18", metavar="NAME", help="any torchvision classification model")
    for option, usual, text in _COUNTS:
        what.add_argument(option, type=partial(parse_count, where=option), default=usual, metavar="N", help=text)
    what.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights, order, shifts (default 0)")
    what.add_argument("--lr", type=_positive, default=0.05, metavar="X", help="first learning rate (default 0.05)")
    exact = "the same weights, bit for bit, on any number of ranks (default method: tree)"
    what.add_argument("--exact", nargs="?", const=EXACT_METHODS[0], choices=EXACT_METHODS, help=exact)
    splits = "how the ranks split the model: ddp (each has all of it), zero1, fsdp, hsdp, or a mesh such as"
    splits += " data=-1,shard=8 (default: the job file's, else ddp)"
    what.add_argument("--parallel", metavar="P", help=splits)
    run = parser.add_argument_group("run")
    run.add_argument("--run-dir", metavar="DIR", help="the run folder (default: the job's, else runs/digits)")
    often = "how often: 500 (steps), or 30m (default: at the end of each epoch, and after 10m)"
    run.add_argument("--save-every", type=lambda text: read_number(text) or text, metavar="STEPS|TIME", help=often)
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Trains. The rank that failed prints its error, the others print nothing."""
    missing = find_missing_library("hpcddp train", "torch", "torchvision", "sklearn", extras="train,demo")
    if missing is not None:
        raise missing
    from hpcddp.trainer import train
    from hpcddp.training.rendezvous.failure import PeerFailedError

    try:
        train(args, args.run_dir or (None if env.get("HPCDDP_RUN_DIR") else os.path.join("runs", "digits")))
    except PeerFailedError as error:
        if env.get("HPCDDP_LOG_RANKS") == "1":  # the failed rank prints to its own log file
            print_message(str(error))
        return error.exit_code
    return 0


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _seed(text: str) -> int:
    number = read_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return number
