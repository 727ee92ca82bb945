"""The scripts of docs/frameworks/, stopped and resumed: they give the weights of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from hpcddp.login.judge import find_status
from hpcddp.runs.folder import RunFolder

PROGRAMS = Path(__file__).parent / "programs"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
# heading on one of the pages -> the file of the weights
SCRIPTS = {
    "HF Trainer": "model/model.safetensors",
    "Lightning Trainer": "model.ckpt",
    "Accelerate": "model/model.safetensors",
    "Fabric": "model.ckpt",
    "DeepSpeed": "model.pt",
    "Plain torch": "model.pt",
}
# Of those that count for themselves; the rest is one rule, for loops
REFUSED = {
    "HF Trainer": "recorded with other settings: global_batch: 8 -> 4",
    "Lightning Trainer": "recorded with other settings: global_batch: 8 -> 4",
    "DeepSpeed": "hpcddp: the checkpoint of step 11 is of 2 ranks, and here are 1 rank",
}
STEPS = 24


def script_of(repo: Path, heading: str) -> str:
    pages = "".join(page.read_text(encoding="utf-8") for page in (repo / "docs/frameworks").glob("*.md"))
    found = re.findall(rf"^### {heading}\n\n```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, heading
    return found[0]


@pytest.fixture
def launch(repo, run):
    """launch(folder, ranks, …): one attempt of train.py in this folder."""

    def launch_attempt(folder: Path, ranks: int = 2, walltime: str = "1:00:00", **env: str):
        path = f"{Path(sys.executable).parent}:{repo}/.venv/bin:/usr/bin:/bin"
        command = [sys.executable, str(PROGRAMS / "stopping.py"), "train.py"]
        own = [sys.executable, "-m", "hpcddp", "launch", "--here", "--ranks-per-node", str(ranks), "--name", "own"]
        own += ["--walltime", walltime]
        return run([*own, "--", *command], env={"PATH": path, "OMP_NUM_THREADS": "1", **ROOT} | env, cwd=folder)

    return launch_attempt


def begin(folder: Path, script: str) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(script, encoding="utf-8")
    return folder


def state(folder: Path) -> list[object]:
    read = json.loads((folder / "runs/own/state.json").read_text())
    return [read["status"], read["step"], read["reason"]]


def weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    content = torch.load(file, weights_only=False)
    return content.get("state_dict") or content.get("model") or content


@pytest.mark.parametrize("heading", SCRIPTS)
def test_a_script_of_the_page_is_stopped_and_resumed_and_gives_the_same_weights(heading, repo, launch, tmp_path):
    script = script_of(repo, heading)
    whole, parts = begin(tmp_path / "whole", script), begin(tmp_path / "parts", script)
    done = launch(whole)
    assert done.returncode == 0, done.stdout + done.stderr
    assert state(whole) == ["finished", STEPS, "the training loop came to its end"]
    shown = find_status([RunFolder(str(whole / "runs/own"))], {}).runs[0]
    assert shown.step == STEPS
    if "Trainer" in heading:
        assert shown.total_steps == STEPS
    # after the last step of the first epoch of three, and inside the second one
    for at, signal, step in [(7, "SIGTERM", 8), (2, "SIGUSR1", 11)]:
        stopped = launch(parts, STOP_AT=f"{at} {signal}")
        assert stopped.returncode == 85, stopped.stdout + stopped.stderr
        assert state(parts) == ["unfinished", step, signal]
    assert not (parts / SCRIPTS[heading]).exists()
    (parts / "trained/checkpoint-99").mkdir(parents=True, exist_ok=True)  # a job that was killed while it saved
    if heading in REFUSED:
        refused = launch(parts, ranks=1)
        said = refused.stdout + refused.stderr
        assert refused.returncode == 2, said
        assert REFUSED[heading] in said
        assert "Traceback" not in said
    resumed = launch(parts)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "hpcddp: resumed from step 11" in resumed.stdout + resumed.stderr
    assert state(parts) == ["finished", STEPS, "the training loop came to its end"]
    once, twice = weights(whole / SCRIPTS[heading]), weights(parts / SCRIPTS[heading])
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.parametrize("heading", ["HF Trainer", "Lightning Trainer"])
def test_a_second_training_of_a_script_is_refused_with_two_lines(heading, repo, launch, tmp_path):
    script = script_of(repo, heading)
    train = next(line for line in script.splitlines() if line.startswith(("trainer.train(", "trainer.fit(")))
    refused = launch(begin(tmp_path / "run", f"{script}{train}\n"))
    said = refused.stdout + refused.stderr
    assert refused.returncode == 2, said
    assert "hpcddp: this script has opened run runs/own before" in said
    assert "Traceback" not in said


def test_a_killed_attempt_is_resumed_from_the_end_of_the_epoch_before_and_gives_the_same_weights(
    repo, launch, tmp_path
):
    script = script_of(repo, "Lightning Trainer")
    whole, parts = begin(tmp_path / "whole", script), begin(tmp_path / "parts", script)
    assert launch(whole).returncode == 0
    killed = launch(parts, STOP_AT="13 SIGKILL")
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert state(parts)[:2] in (["unfinished", 8], ["failed", 8])  # the other rank may see it before it is killed, too
    assert launch(parts).returncode == 0
    once, twice = weights(whole / "model.ckpt"), weights(parts / "model.ckpt")
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_a_trainer_stops_at_its_deadline_and_one_without_a_run_trains_on(repo, launch, run, tmp_path):
    folder = begin(tmp_path / "run", script_of(repo, "HF Trainer"))
    done = launch(folder, walltime="1s")
    assert done.returncode == 85, done.stdout + done.stderr
    assert state(folder) == ["unfinished", 2, "deadline"]
    alone = run([sys.executable, "train.py"], cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert "no run folder (HPCDDP_RUN_DIR, HPCDDP_ATTEMPT): nothing stops or resumes this training" in alone.stderr
    assert state(folder) == ["unfinished", 2, "deadline"]
    assert (folder / "model/model.safetensors").exists()


def test_lightnings_own_requeue_does_not_fight_the_chain(launch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "bin/scontrol").chmod(0o755)
    line = f"import os\nos.environ['PATH'] = '{tmp_path}/bin:' + os.environ['PATH']\n"
    folder = begin(tmp_path / "run", line + (PROGRAMS / "lightning_requeue.py").read_text())
    done = launch(folder, ranks=1, STOP_AT="3 SIGUSR1")
    assert not (tmp_path / "asked").exists(), done.stdout + done.stderr
    assert done.returncode == 85, done.stdout + done.stderr
    assert state(folder) == ["unfinished", 3, "SIGUSR1"]
    saved = {path.name for path in folder.glob("runs/own/checkpoints/*")}
    assert saved == {"step-00000002", "step-00000003"}


ALWAYS_DUE = "import hpcddp.training.stopping\n\nhpcddp.training.stopping.SaveTimer.is_due = True\n"
OPENED = {
    "HF Trainer": ("attach(trainer)", 'attach(trainer, save_every="10m")'),
    "Plain torch": ("loop(save_every=10)", 'loop(save_every="10m", keep_checkpoints=100)'),
}


@pytest.mark.parametrize("heading", OPENED)
def test_it_saves_when_the_time_of_save_every_is_over(heading, repo, launch, tmp_path):
    """Here that is so after nearly each step."""
    before, after = OPENED[heading]
    script = script_of(repo, heading)
    assert script.count(before) == 1
    folder = begin(tmp_path / "due", ALWAYS_DUE + script.replace(before, after))
    done = launch(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert state(folder)[:2] == ["finished", STEPS]
    saved = sorted((folder / "runs/own/checkpoints").glob("step-*"))
    assert len(saved) > 5, saved
