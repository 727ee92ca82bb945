"""docs/command-line.md has every verb, every exit status, and the JSON keys that are really printed."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.state import RunState, replace_state
from hpcddp.verify.compare import Mismatch, TrialRecord
from hpcddp.verify.trials import Verification
from tests.unit.login.runs import held

# What stands for the capital words of the page's commands, with the rest that a command needs.
COMPLETE = {
    "hpcddp env --json": "",
    "hpcddp layout --json": "--site local -- true",
    "hpcddp advise --json": "--params 1e9 --layers 9 --hidden 2048 --sequence 512 --gpu-memory 80GB --global-batch 1",
    "hpcddp check --json": "--site local",
    "hpcddp lint --json": "job.sh",
    "hpcddp sites --json": "",
    "hpcddp sites show NAME --json": "",
    "hpcddp sites check --json": "",
    "hpcddp status --json": "run",
    "hpcddp diagnose --json": "run",
    "hpcddp efficiency --json": "run",
    "hpcddp compare --json": "run run",
    "hpcddp verify --json": "-- python train.py",
}
WORDS = {"NAME": "abci3"}


def rows(repo) -> dict[str, str]:
    """Command -> the cell with its keys."""
    section = (repo / "docs/command-line.md").read_text().split("\n## JSON\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, re.MULTILINE))


def keys_of(value: object) -> set[str]:
    """The keys of an object, and of the objects in its lists."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {
        key
        for name in (
            "findings",
            "lines",
            "ranks",
            "sites",
            "splits",
            "impossible",
            "recommended",
            "runs",
            "cause",
        )
        for key in keys_of(value.get(name))
    }


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with a job script that has a mistake, and a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("hpcddp.cli.check.check_python", lambda *_: [])  # which imports torch
    other = Mismatch("loss", ("1 rank", "2 ranks"), (0, 0), values=(1.0, 2.0), ranks=2)
    result = Verification((TrialRecord("1 rank", 1, [[]]),), (other,), whole=True)
    monkeypatch.setattr("hpcddp.cli.verify.verify", lambda *_: result)
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python a.py\n#SBATCH --time=1:00:00\n")
    attempt = tmp_path / "run/attempts/1"
    attempt.mkdir(parents=True)
    held(RunFolder("run"), "7", status=0)
    replace_state(RunFolder("run"), RunState("finished", 2, 1, "", "1"))
    start = {"kind": "start", "schema": 1}
    steps = [{"kind": "step", "step": n, "epoch": 0, "loss": 1.0 / n, "time": n} for n in (1, 2)]
    (attempt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (start, *steps)))


@pytest.mark.parametrize("command", COMPLETE)
def test_the_documented_keys_are_the_printed_ones(command, repo, there, capsys):
    documented = rows(repo)[command]
    typed = " ".join(WORDS.get(word, word) for word in command.split()[1:])
    status = main(shlex.split(f"{typed} {COMPLETE[command]}"))
    assert status in {0, 1}
    printed = keys_of(json.loads(capsys.readouterr().out))
    assert printed <= set(re.findall(r"`(\w+)`", documented))


def test_every_command_with_json_is_in_the_table(repo):
    assert set(rows(repo)) == set(COMPLETE)
