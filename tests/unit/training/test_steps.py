"""The sums of each step, and how many steps share an exchange."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcddp.training.parallel.layout import Layout
from hpcddp.training.steps import StepSum

RunRanks = Callable[..., Any]


def test_short_steps_share_an_exchange_and_long_ones_have_one_each(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("loop_bodies:share_exchanges", 2, str(tmp_path)).check()
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == other
    assert first["found"] == [[step, step, {"measured": 2.0 * step} if step % 3 == 0 else {}] for step in range(140)]
    agreed = first["agreed"]
    assert agreed[:51] == [*range(51)]  # the first steps have one each
    assert [step for step in agreed if 51 <= step < 100] == [*range(58, 100, 8)]
    assert [step for step in agreed if step >= 114] == [*range(114, 140)]  # one exchange later than they became long
    assert first["stopped"] == 131


def test_a_single_rank_shares_them_too_and_loses_no_step() -> None:
    sums = StepSum(Layout(0, 1), torch.device("cpu"), clock=lambda: 0.0)
    known, exchanged = [], []
    for step in range(140):
        sums.add_loss(torch.tensor(2.0 * step), 0.5)
        if sums.add_step(1, step=step):
            exchanged.append(step)
            known += [one.numbers["loss"] for one in sums.exchange(()).steps]
    assert exchanged == [*range(51), *range(58, 140, 8)]
    assert known == [float(step) for step in range(exchanged[-2] + 1)]
