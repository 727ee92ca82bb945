"""The reference trainer's command line. No torch here, so that `--help` is quick."""

from __future__ import annotations

import argparse
import math

from hpcddp.batchplan import EXACT_METHODS, LEARNING_RATE_RULES
from hpcddp.errors import RequestError
from hpcddp.training.arguments import SaveEvery, read_save_every
from hpcddp.training.rendezvous.store_address import CHANNELS
from hpcddp.units import parse_count, read_number

DATASETS = ("digits", "mnist", "cifar10", "imagefolder", "fake")
DEFAULT_GLOBAL_BATCH = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of the trainer to a parser."""
    data = parser.add_argument_group("data and model")
    data.add_argument(
        "--dataset", choices=DATASETS, default="digits", help="digits comes with scikit-learn; fake is noise"
    )
    data.add_argument(
        "--data-dir", metavar="DIR", help="where mnist, cifar10 or imagefolder lie; nothing is ever downloaded"
    )
    data.add_argument("--image-size", type=_count, metavar="PIXELS", help="side of the images as the model sees them")
    data.add_argument("--model", default="resnet18", metavar="NAME", help="any torchvision classification model")
    data.add_argument("--workers", type=_whole, default=0, metavar="N", help="loader processes per rank (default 0)")

    batch = parser.add_argument_group("training")
    batch.add_argument(
        "--global-batch",
        type=_count,
        metavar="N",
        help="samples per optimizer step over all ranks (default: the job plan's, else 64)",
    )
    batch.add_argument("--max-micro-batch", type=_count, metavar="N", help="most samples per forward pass of one rank")
    batch.add_argument("--epochs", type=_count, default=6, metavar="N", help="passes over the data (default 6)")
    batch.add_argument(
        "--limit-steps", type=_count, metavar="N", help="stop after N steps of this attempt; the next one resumes"
    )
    batch.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="default: sgd, with momentum 0.9")
    batch.add_argument(
        "--lr", type=_positive, metavar="X", help="peak learning rate (default 0.05 for sgd, 0.001 for adamw)"
    )
    batch.add_argument(
        "--lr-rule",
        choices=LEARNING_RATE_RULES,
        default="none",
        help="how --lr follows the global batch (default none)",
    )
    batch.add_argument("--base-batch", type=_count, metavar="N", help="the global batch that --lr is for")
    batch.add_argument("--weight-decay", type=_finite, default=5e-4, metavar="X", help="default 0.0005")
    batch.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights, order, augmentation (default 0)")
    batch.add_argument(
        "--amp", choices=("bf16", "none"), help="autocast (default: bf16 on a GPU that has it, else none)"
    )

    batch.add_argument(
        "--exact",
        nargs="?",
        const=EXACT_METHODS[0],
        choices=EXACT_METHODS,
        help="the same weights, bit for bit, on any number of ranks (default method: tree)",
    )
    batch.add_argument(
        "--slices", type=_count, metavar="K", help="fixed slices of a global batch with --exact (default 8)"
    )

    batch.add_argument(
        "--parallel",
        metavar="P",
        help="how the ranks split the model: ddp (each has all of it), zero1, fsdp, hsdp, or a mesh such as"
        " data=-1,shard=8 (default: the job file's, else ddp)",
    )

    run = parser.add_argument_group("run")
    run.add_argument(
        "--run-dir", metavar="DIR", help="checkpoints, metrics and state (default: HPCDDP_RUN_DIR, else runs/DATASET)"
    )
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--fresh",
        dest="resume",
        action="store_false",
        default=True,
        help="begin a new run, although one could be resumed",
    )
    which.add_argument(
        "--resume",
        metavar="RUN",
        default=True,
        help="resume this run, whatever its command and state, such as digits-2",
    )
    run.add_argument(
        "--save-every",
        type=_save_every,
        default=SaveEvery(),
        metavar="STEPS|TIME",
        help="how often: 500 (steps), or 30m (default: at the end of each epoch, and after 10m)",
    )
    run.add_argument(
        "--checkpoint",
        choices=("single", "sharded", "async"),
        help="one file, one per rank, or one per rank beside the training (default: single; sharded for fsdp)",
    )
    run.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl on GPUs, else gloo")
    run.add_argument("--rendezvous", choices=CHANNELS, default="auto", help="how the ranks learn where rank 0 is")


def _number(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _finite(text: str) -> float:
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


def _whole(text: str) -> int:
    number = read_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return number


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def _save_every(text: str) -> SaveEvery:
    try:
        return read_save_every(read_number(text) or text, "{}")
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor a time") from error


def _count(text: str) -> int:
    try:
        return parse_count(text, "value")
    except RequestError as error:
        raise argparse.ArgumentTypeError(error.message) from error
