"""The reference trainer: `hpcddp train`, or `python -m hpcddp.trainer.train` on every rank.

It is an ordinary training loop with the helpers of `hpcddp.runtime`: read `run` and `train_epoch` as an example.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache

from hpcddp.trainer.libraries import find_missing_library

if __name__ == "__main__" and (missing := find_missing_library("python -m hpcddp.trainer.train")):
    print(f"hpcddp: {missing}", file=sys.stderr)
    sys.exit(missing.exit_code)

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.parallelism import Parallel, read_parallel
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.opening import read_planned_batch
from hpcddp.trainer.images import Images, load_images
from hpcddp.trainer.learning_rate import DEFAULT_RATES, PeakRate, plan_rate
from hpcddp.trainer.models import check_model, make_model
from hpcddp.trainer.options import DEFAULT_GLOBAL_BATCH, add_options
from hpcddp.trainer.summary import describe
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.opening import open_runtime
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.rendezvous.failure import PeerFailedError
from hpcddp.training.runtime import Runtime

_WARM_UP = 0.15  # of all steps


@dataclass(frozen=True, slots=True)
class Score:
    """Means over samples, of all ranks together."""

    loss: float
    accuracy: float


def _read_parallel(text: str) -> Parallel:
    """RequestError for a split of layers: the models here have no plan for it."""
    parallel = read_parallel(text, "--parallel")
    if divided := [name for name, _ in parallel.degrees if name in ("tensor", "pipeline")]:
        raise RequestError(
            f"--parallel {text}: the models of hpcddp train have no {divided[0]} plan",
            "--parallel fsdp; or a training script of your own (docs/parallel.md)",
        )
    return parallel


def run(args: argparse.Namespace, env: MutableMapping[str, str]) -> None:
    """Train as the options say. `env` is the process's environment; rank 0 prints."""
    run_dir = args.run_dir or env.get("HPCDDP_RUN_DIR") or f"runs/{args.dataset}"
    batch = args.global_batch or read_planned_batch(RunFolder(run_dir)) or DEFAULT_GLOBAL_BATCH
    options = RuntimeOptions(
        global_batch=batch,
        seed=args.seed,
        max_micro_batch=args.max_micro_batch,
        parallel=_read_parallel(args.parallel) if args.parallel else None,
        run_dir=run_dir,
        resume=args.resume,
        save_every=args.save_every,
        checkpoint=args.checkpoint,
        backend=args.backend,
        rendezvous=args.rendezvous,
        exact=args.exact or False,
        slices=args.slices,
        by_options=True,
    )

    @cache
    def read_input() -> tuple[PeakRate, Images]:
        check_model(args.model)
        rate = args.lr or DEFAULT_RATES[args.optimizer]
        peak = plan_rate(rate, args.optimizer, args.lr_rule, args.base_batch, batch)
        return peak, load_images(args.dataset, args.data_dir, args.image_size)

    with open_runtime(env, options, read_input) as rt:
        peak, images = read_input()
        record_options(rt, args)
        model = rt.wrap(make_model(args.model, images.classes, images.side))
        loader = rt.loader(images.train, num_workers=args.workers)
        held_out = rt.evaluation_loader(images.test, 256, num_workers=args.workers)
        optimizer = make_optimizer(args, model, peak.learning_rate)
        steps = args.epochs * math.ceil(images.samples / batch)
        scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
        rt.track(model=model, optimizer=optimizer, scheduler=scheduler)
        if peak.remark:
            rt.print(f"hpcddp: {peak.remark}")
        what = f"{args.model} on {args.dataset}"
        rt.summary.update(describe(rt, what, None))  # a run that has to stop takes no time for a test

        amp = torch.autocast(rt.device.type, torch.bfloat16, enabled=wants_bf16(args.amp, rt.device))
        last_step = rt.steps + args.limit_steps if args.limit_steps else None
        test: Score | None = None
        for epoch in rt.epochs(args.epochs):
            epoch_began, consumed = time.monotonic(), loader.sampler.consumed
            train_score = train_epoch(rt, model, loader, optimizer, scheduler, amp, last_step)
            seconds, samples = time.monotonic() - epoch_began, loader.sampler.consumed - consumed
            test = evaluate(rt, model, held_out, amp)
            speed = samples / seconds
            report_epoch(rt, epoch, train_score if samples else None, test, speed, float(scheduler.get_last_lr()[0]))
            rt.summary.update(describe(rt, what, test.accuracy))
        if test is None:  # nothing was left to train
            rt.summary.update(describe(rt, what, evaluate(rt, model, held_out, amp).accuracy))


def record_options(rt: Runtime, args: argparse.Namespace) -> None:
    """`options.json` of this attempt, for `hpcddp compare`; without what only says where its files are."""
    if rt.folder is not None and rt.group.is_first:
        where = {"run_dir", "data_dir", "command"}
        write_object(rt.folder.options, {k: v for k, v in vars(args).items() if k not in where})


def train_epoch(
    rt: Runtime,
    model: nn.Module,
    loader: TrainingLoader,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    amp: torch.autocast,
    last_step: int | None,
) -> Score:
    """The rest of one epoch. Loss and accuracy are summed on the device and come over the ranks once, at the end."""
    model.train()
    sums = torch.zeros(3, dtype=torch.float64, device=rt.device)  # loss, correct, samples
    for images, classes in loader:
        with amp:
            scores = model(images)
            loss = cross_entropy(scores, classes)
        rt.backward(loss)
        sums += tally(scores.detach(), classes, loss.detach(), rt.micro_batch_samples)
        if rt.step(optimizer, scheduler=scheduler) and rt.steps + 1 == last_step:
            rt.stop("the limit of --limit-steps")
    return mean(rt.sum(sums))


@torch.no_grad()
def evaluate(rt: Runtime, model: nn.Module, held_out: EvaluationLoader, amp: torch.autocast) -> Score:
    """Exact over all ranks: each sample counts once."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=rt.device)
    for images, classes in held_out:
        with amp:
            scores = model(images)
            loss = cross_entropy(scores, classes)
        sums += tally(scores, classes, loss, len(classes))
    return mean(rt.sum(sums))


def tally(scores: torch.Tensor, classes: torch.Tensor, mean_loss: torch.Tensor, count: int) -> torch.Tensor:
    """(summed loss, correct answers, samples) of one micro batch, on its device; zeros if it does not count."""
    correct = (scores.argmax(1) == classes).sum()
    part = torch.stack(
        [mean_loss.double() * count, correct.double(), torch.full_like(correct, count, dtype=torch.float64)]
    )
    return part if count else torch.zeros_like(part)


def mean(sums: torch.Tensor) -> Score:
    loss, correct, samples = sums.tolist()
    return Score(loss / max(samples, 1), correct / max(samples, 1))


def report_epoch(
    rt: Runtime, epoch: int, train: Score | None, test: Score, samples_per_s: float, learning_rate: float
) -> None:
    """One line for people and one for metrics.jsonl, on rank 0. `train`: None if an attempt before had all batches."""
    if not rt.group.is_first:
        return
    score = f"test accuracy {test.accuracy:.2%}"
    numbers = {"test_loss": test.loss, "test_acc": test.accuracy, "lr": learning_rate}
    if train is not None:
        score = f"loss {train.loss:.4f}  {score}  {samples_per_s:,.0f} samples/s"
        numbers |= {"loss": train.loss, "acc": train.accuracy, "samples_per_s": round(samples_per_s, 1)}
    rt.print(f"epoch {epoch}: {score}")
    rt.metrics.write("epoch", step=rt.steps, epoch=epoch, **numbers)


def make_optimizer(args: argparse.Namespace, model: nn.Module, peak: float) -> Optimizer:
    """SGD with Nesterov momentum, or AdamW, at the peak learning rate: it never follows the world size."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=args.weight_decay)
    return torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=args.weight_decay)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """Part of the peak learning rate at a step: up in a straight line, then down to zero along a cosine."""
    warm_up = max(1, round(steps * _WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


def wants_bf16(amp: str | None, device: torch.device) -> bool:
    """bf16 where it was asked for; if nothing was, on GPUs that compute in it."""
    return amp == "bf16" or (amp is None and device.type == "cuda" and torch.cuda.is_bf16_supported())


def run_and_report(args: argparse.Namespace, env: MutableMapping[str, str]) -> int:
    """`run`, and the exit status. The rank that failed prints its error, the others print nothing."""
    try:
        run(args, env)
    except PeerFailedError as error:
        if env.get("HPCDDP_LOG_RANKS") == "1":  # the failed rank prints to its own log file
            print(error, file=sys.stderr)
        return error.exit_code
    return 0


def main(argv: list[str], env: MutableMapping[str, str]) -> int:
    """The edge of `python -m hpcddp.trainer.train`."""
    parser = argparse.ArgumentParser(prog="python -m hpcddp.trainer.train", description=__doc__, allow_abbrev=False)
    add_options(parser)
    try:
        return run_and_report(parser.parse_args(argv), env)
    except HpcddpError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
