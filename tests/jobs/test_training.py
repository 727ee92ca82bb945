"""The jobs that train, run as a user runs them: on several ranks as on one, and over a stop."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.jobs.rows import ROWS, Row

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


def check_equal(row: Row, found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == reference.keys()
    assert found
    for name, weight in found.items():
        if row.equal_to == "bits":
            assert torch.equal(weight, reference[name]), name
        else:
            assert weight.dtype == torch.float64 or not weight.is_floating_point(), name
            assert (weight - reference[name]).abs().max() <= float(row.equal_to), name


def trained(row: Row) -> bool:
    return row.equal_to == "bits" or row.equal_to[0].isdigit()


@pytest.mark.parametrize("row", [row for row in ROWS if trained(row)], ids=lambda row: row.name)
def test_several_ranks_have_the_weights_of_one(row, user_folder):
    folders = {ranks: user_folder(row, f"ranks-{ranks}") for ranks in row.ranks}
    for ranks, folder in folders.items():
        done = folder.render_and_run(ranks, add=row.exact)
        assert done.returncode == 0, done.stdout + done.stderr
    for ranks in row.ranks[1:]:
        check_equal(row, folders[ranks].weights(), folders[row.ranks[0]].weights())


@pytest.mark.parametrize("row", [row for row in ROWS if row.resumes == "yes"], ids=lambda row: row.name)
def test_a_run_that_had_to_stop_goes_on_with_another_number_of_ranks(row, user_folder):
    whole, stopped = user_folder(row, "whole"), user_folder(row, "stopped")
    few, many = row.ranks[0], row.ranks[-1]
    assert whole.render_and_run(few, add=row.exact).returncode == 0
    first = stopped.render_and_run(many, "--walltime", "0:00:01", add=row.exact)  # over when the first step ends
    assert first.returncode == 85, first.stdout + first.stderr
    assert (stopped.state()["status"], stopped.state()["step"] > 0) == ("unfinished", True)
    second = stopped.render_and_run(few, add=row.exact)
    assert second.returncode == 0, second.stdout + second.stderr
    assert stopped.state()["status"] == "finished"
    check_equal(row, stopped.weights(), whole.weights())
