"""`hpcddp train`: the reference trainer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.trainer.libraries import find_missing_library
from hpcddp.trainer.options import add_options


def build_parser() -> VerbParser:
    """The trainer's options."""
    parser = VerbParser(
        "train",
        "Train a torchvision model with DDP; run it on every rank (hpcddp launch, or a rendered job).",
        example="hpcddp train --dataset digits --epochs 5\n"
        "hpcddp launch --ranks-per-node 2 -- hpcddp train --dataset digits --global-batch 64",
        exits=(2, 4),
    )
    add_options(parser)
    return parser


def run(args: argparse.Namespace, _env: Mapping[str, str]) -> int:
    """Hands over to the trainer, with the process's own environment: gloo reads one variable from there."""
    missing = find_missing_library("hpcddp train")
    if missing is not None:
        raise missing
    from hpcddp.trainer import train

    return train.run_and_report(args, os.environ)
