"""Numbers, rows, objects and weights of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import hpcddp
from hpcddp.errors import RequestError

RunRanks = Callable[..., Any]


def test_numbers_rows_and_objects_of_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("loop_bodies:meet_in_numbers", 3, str(tmp_path)).check()
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {
            "int": 6,
            "float": 1.5,
            "numpy": [3, 1.5],
            "mixed": [1.0, 1.0],
            "small": [300, 300, 300],
            "truth": [3, 2],
            "complex": "3j",
            "vector": [3.0, 6.0],
            "rows": [[0.0], [1.0], [1.0], [2.0], [2.0], [2.0]],
            "kinds": [[0, 1, 0], [False, True, False]],
            "nothing": [0, 2],
            "told": "rank 0",
            "evaluated": list(range(7)),
            "batches": 2,
            "refused": ["rt.sum", "rt.gather", "rt.broadcast", "rt.save_model", "a loop over evaluation data"],
        }


def test_models_that_are_not_trained_start_alike_on_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("loop_bodies:prepare_models_that_are_not_trained", 2, str(tmp_path)).check()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["teacher.mask"] == "[True, False]"
    assert found[0]["same"] == "True"


@pytest.mark.parametrize("rows", [[1, 2], 7, numpy.zeros(2)], ids=str)
def test_what_is_no_tensor_has_no_rows_to_gather(rows: Any) -> None:
    with hpcddp.runtime(4) as rt, pytest.raises(RequestError, match=r"has no rows to gather\nhint: rt\.gather"):
        rt.gather(rows)


def test_a_teachers_running_statistics_are_exact_too(run_ranks: RunRanks, tmp_path: Path) -> None:
    for ranks in (1, 3):
        run_ranks("loop_bodies:learn_from_a_teacher", ranks, str(tmp_path)).check()
    one, *several = [json.loads((tmp_path / f"{place}.json").read_text()) for place in ("1.0", "3.0", "3.1", "3.2")]
    assert several == [one] * 3
    assert one != [0.0] * 3


@pytest.mark.parametrize("grad", [True, False])
def test_a_loss_over_gathered_rows_is_refused_in_its_backward_pass(grad: bool) -> None:
    with hpcddp.runtime(4) as rt:
        rows = torch.ones(3, 2, dtype=torch.float64, requires_grad=grad)
        found = rt.gather(rows * 2)
        assert found.tolist() == [[2.0, 2.0]] * 3
        assert found.requires_grad is grad
        if grad:
            with pytest.raises(RequestError, match=r"result has no gradient.*\nhint: rt\.gather\(x\.detach\(\)\)"):
                (found @ rows.T).sum().backward()
            with pytest.raises(RequestError, match=r"from rt\.sum\(…\), whose result has no gradient"):
                (rt.sum(rows) @ rows.T).sum().backward()
        with torch.no_grad():
            assert not rt.gather(rows).requires_grad
