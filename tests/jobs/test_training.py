"""The jobs that train, run as a user runs them: on several ranks as on one, and over a stop."""

from __future__ import annotations

import re
import runpy

import pytest
import torch

from tests.jobs.comparing import check_equal, compare_ranks
from tests.jobs.rows import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.mark.parametrize("row", [row for row in ROWS if row.trains and not row.package], ids=lambda row: row.name)
def test_several_ranks_have_the_weights_of_one(row, user_folder):
    compare_ranks(row, user_folder)


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


@pytest.mark.parametrize("row", [row for row in ROWS if row.prints], ids=lambda row: row.name)
def test_a_job_without_weights_to_compare_runs_and_says_what_it_found(row, user_folder):
    done = user_folder(row, "one").render_and_run(row.ranks[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(row.prints, done.stdout), done.stdout


def test_the_pipeline_refuses_micro_batches_of_unequal_size(repo, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pipeline.py", "--batch", "62"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(repo / "jobs/plain/pipeline.py"))
    assert "--batch 62 does not divide into 4 micro batches of one size" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_the_ranks_meet_at_an_address_and_through_a_file_too(way, user_folder):
    (row,) = (row for row in ROWS if row.job == "plain/init.yaml")
    done = user_folder(row, "one").render_and_run(2, command=f"python init.py {way}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{way}: 2 ranks met" in done.stdout


def test_torch_has_no_init_method_mpi():
    with pytest.raises(RuntimeError, match="No rendezvous handler for mpi://"):
        torch.distributed.init_process_group("gloo", init_method="mpi://", rank=0, world_size=1)


def test_torchs_own_context_parallel_has_no_attention_for_cpus():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(1, 2, 8, 4)
        with (
            pytest.raises(NotImplementedError, match=r"flash_attention_for_cpu.* does not have a sharding strategy"),
            context_parallel(init_device_mesh("cpu", (1,)), buffers=[x], buffer_seq_dims=[2]),
        ):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    finally:
        torch.distributed.destroy_process_group()
