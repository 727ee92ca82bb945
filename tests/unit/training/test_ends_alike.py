"""What differs between ranks behind the last checkpoint of a run, and in sums: found on every rank, and no hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpcddp
from hpcddp.errors import RequestError

RunRanks = Callable[..., Any]

SAID = {
    "_scale": "after step 2 the weights of rank 1 are not those of rank 0: 0.weight of Sequential differs by up to",
    "_sum_lengths": "rt.sum got another shape on each rank: (2,) on rank 0, (3,) on rank 1\nhint: sum tensors of one",
    "_sum_number_and_vector": "rt.sum got another shape on each rank: () on rank 0, (3,) on rank 1",
}


def test_the_ranks_weights_and_sums_are_compared_to_the_end(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("end_bodies:end_in_ways", 2, str(tmp_path)).check()
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("_export", "_cut"):  # for a file of rank 0's
            assert said.pop(name) == ""
        assert said.keys() == SAID.keys()
        for name, words in SAID.items():
            assert words in said[name]


@pytest.mark.parametrize("number", [2**70, -(2**63)])
def test_a_number_that_is_too_large_for_a_sum_is_refused(number: int) -> None:
    with hpcddp.runtime(4) as rt, pytest.raises(RequestError, match=r"does not fit.*\nhint: rt\.sum\(float\(number\)"):
        rt.sum(number)
