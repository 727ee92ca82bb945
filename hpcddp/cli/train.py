"""`hpcddp train`: the reference trainer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.training.options import add_options


def build_parser() -> VerbParser:
    parser = VerbParser(
        "train", "Train a torchvision model with DDP; run it on every rank (hpcddp launch, or a rendered job)."
    )
    add_options(parser)
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """Hands over to the trainer, with the process's own environment: gloo reads one variable from there."""
    if args.command:
        raise RequestError(f"hpcddp train takes no command after --, got {args.command[0]!r}", "hpcddp train --help")
    from hpcddp.training import train

    return train.run_and_tell(args, os.environ)
