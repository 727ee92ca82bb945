"""The learning rate of a run. It changes only by a rule that was asked for, and every change is printed."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.batchplan import scale_learning_rate
from hpcddp.errors import RequestError

DEFAULT_RATES = {"sgd": 0.05, "adamw": 1e-3}
_SUITS = {  # by kind of optimizer: rule, and where it comes from
    "sgd": ("linear", "with a warm-up of some epochs: Goyal et al. 2017, arXiv 1706.02677"),
    "adamw": ("sqrt", "with betas and eps adjusted: Malladi et al. 2022, arXiv 2205.10287"),
}


class PeakRate(NamedTuple):
    """`remark`: a sentence to print, None if there is nothing to print."""

    learning_rate: float
    remark: str | None


def plan_rate(learning_rate: float, optimizer: str, rule: str, base_batch: int | None, global_batch: int) -> PeakRate:
    """The peak learning rate at `global_batch`, from one for `base_batch` (None: it is for `global_batch` itself).

    `optimizer` is "sgd" or "adamw". Raises RequestError for a rule without a base batch.
    """
    if base_batch is None:
        if rule != "none":
            raise RequestError(
                f"--lr-rule {rule} needs the global batch that the learning rate was tuned for",
                f"--base-batch {global_batch}, or whatever it was tuned at",
            )
        return PeakRate(learning_rate, None)
    if base_batch == global_batch:
        return PeakRate(learning_rate, None)
    suiting, source = _SUITS[optimizer]
    scaled = scale_learning_rate(learning_rate, base_batch, global_batch, rule)
    batches = f"batch {base_batch} -> {global_batch}"
    remark = f"learning rate {learning_rate:g} -> {scaled:g} by the rule {rule}, {batches}"
    if rule == "none":
        remark = f"learning rate {learning_rate:g} as it is, {batches}"
    return PeakRate(scaled, remark if rule == suiting else f"{remark}; for {optimizer}: --lr-rule {suiting} ({source})")
