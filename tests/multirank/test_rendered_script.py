"""A script rendered for this machine runs: real mpirun, two ranks, the run folder, and the command's own status."""

from __future__ import annotations

import json
import os
import sys

import pytest

pytestmark = pytest.mark.multirank
RENDER = ["hpcddp", "render", "--site", "local", "--nodes", "1", "--ranks-per-node", "2", "--name", "two"]


@pytest.fixture
def script(run, tmp_path):
    def render(*command) -> str:
        done = run([*RENDER, "--", *map(str, command)], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return render


def test_every_rank_runs_and_leaves_its_records(script, openmpi5, run, programs, tmp_path):
    (tmp_path / "out").mkdir()
    text = script(sys.executable, programs / "whoami.py", tmp_path / "out")
    done = run(["bash"], stdin=text, cwd=tmp_path, env=openmpi5.env)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        report = json.loads((tmp_path / f"out/rank-{rank}.json").read_text())
        assert report["exported"] == report["mpi"]
    run_dir = tmp_path / "runs/two"
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["world_size"] == 2
    (attempt,) = (run_dir / "attempts").iterdir()
    assert len(list((attempt / "env").iterdir())) == 2
    for rank in range(2):
        recorded = run(["hpcddp", "env", "--json", "--from", attempt / f"env/rank-{rank:04d}.env"])
        assert recorded.returncode == 0, recorded.stderr
        place = json.loads(recorded.stdout)
        assert (place["rank"], place["world_size"], place["launcher"]) == (rank, 2, "openmpi")


def test_a_job_with_gpus_that_sees_none_does_not_train(openmpi5, run, tmp_path):
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "")
    done = run([*RENDER, "--gpus-per-node", "2", "--", "python", "-c", "open('trained', 'w')"], cwd=tmp_path)
    done = run(["bash"], stdin=done.stdout, cwd=tmp_path, env=openmpi5.env | hidden)
    assert done.returncode == 4
    printed = done.stdout + done.stderr
    assert "the job has 2 GPUs on each node, and rank " in printed, printed  # by each rank that gets so far
    assert "hint: to train on CPUs, with any program: export ACCELERATE_USE_CPU=true, " in printed
    assert not (tmp_path / "trained").exists()
    told = run([*RENDER, "--gpus-per-node", "2", "--", "hpcddp", "env"], cwd=tmp_path)  # no training
    assert run(["bash"], stdin=told.stdout, cwd=tmp_path, env=openmpi5.env | hidden).returncode == 0


@pytest.mark.parametrize("flavour", ["openmpi5", "mpich", "impi"], indirect=True)
def test_each_launcher_that_can_be_asked_for_runs(flavour, run, programs, tmp_path):
    """.venv's own Open MPI 5 comes first on PATH inside the script; it must not stand in for another launcher."""
    done = run([*RENDER, "--launcher", flavour.launcher, "--", sys.executable, programs / "whoami.py", tmp_path])
    done = run(["bash"], stdin=done.stdout, cwd=tmp_path, env=flavour.env)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        report = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert report["hpcddp"] == {"launcher": flavour.launcher, **report["mpi"]}


TRAIN = """
import torch, hpcddp
from torch.utils.data import DataLoader, TensorDataset
model, data = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
with hpcddp.runtime() as rt:
    model, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for epoch in rt.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            rt.backward(model(x).mean())
            optimizer.step()
"""


def test_a_job_of_a_shell_script_is_compared_by_its_own_words_and_an_edited_job_script_keeps_its_run(
    openmpi5, run, tmp_path
):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.sh").write_text("python train.py\n")
    render = ["hpcddp", "render", "--site", "local", "--nodes", "1", "--ranks-per-node", "1"]
    text = run([*render, "--", "bash", "run.sh", "--lr", "0.1"], cwd=tmp_path).stdout
    done = run(["bash"], stdin=text, cwd=tmp_path, env=openmpi5.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run runs/run-lr0.1: new\n" in done.stdout + done.stderr
    recorded = json.loads((tmp_path / "runs/run-lr0.1/settings.json").read_text())["settings"]
    assert recorded["run"]["command"] == ["bash", "run.sh", "--lr", "0.1"]
    assert sorted(recorded["script"]) == ["run.sh", "train.py"]

    edited = run(["bash"], stdin=text.replace("--lr 0.1", "--lr 0.2"), cwd=tmp_path, env=openmpi5.env)
    assert edited.returncode == 2, edited.stdout + edited.stderr
    differs = "run runs/run-lr0.1 was recorded with other settings: command: 0.1 -> 0.2\nhint: --accept command takes"
    assert differs in edited.stdout + edited.stderr
    assert os.listdir(tmp_path / "runs") == ["run-lr0.1"]
