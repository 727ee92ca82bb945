"""Whether a job's weights are the same on several ranks as on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.jobs.rows import Row


def compare_ranks(row: Row, user_folder: Callable[[Row, str], object]) -> None:
    """Run the job on each of the row's numbers of ranks, and compare its weights with those on the first."""
    folders = {ranks: user_folder(row, f"ranks-{ranks}") for ranks in row.ranks}
    for ranks, folder in folders.items():
        done = folder.render_and_run(ranks, add=row.exact)
        assert done.returncode == 0, done.stdout + done.stderr
    for ranks in row.ranks[1:]:
        check_equal(row, folders[ranks].weights(), folders[row.ranks[0]].weights())


def check_equal(row: Row, found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == reference.keys()
    assert found
    for name, weight in found.items():
        if row.equal_to == "bits":
            assert torch.equal(weight, reference[name]), name
        else:
            assert weight.dtype == (torch.float32 if row.why else torch.float64), name
            assert (weight - reference[name]).abs().max() <= float(row.equal_to), name
