"""`hpcddp verify` finds mistakes that no check of a running loop sees, and raises no alarm for unusual scripts."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.verify.compare import (
    ROUNDING,
    Mismatch,
    TrialRecord,
    compare_trials,
    find_line_of_stack,
    find_other_numbers,
)
from hpcddp.verify.report import describe_mismatch, format_verification, list_causes, verification_record
from hpcddp.verify.trials import Plan, Verification, compare, copy_folder, hosting

_spec = importlib.util.spec_from_file_location("verify_scripts", Path(__file__).with_name("scripts.py"))
scripts = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = scripts  # a NamedTuple looks its module up
_spec.loader.exec_module(scripts)
MISTAKES, RIGHT = scripts.MISTAKES, scripts.RIGHT

pytestmark = pytest.mark.xdist_group("verify")  # one worker has the process that forks the ranks


@pytest.fixture(scope="module")
def host() -> Iterator[object]:
    with tempfile.TemporaryDirectory() as folder, hosting([sys.executable], folder, os.environ) as process:
        yield process


@pytest.fixture
def verify(host, tmp_path):
    def run(text: str, **files: bytes) -> Verification:
        home = tmp_path / "home"
        home.mkdir()
        (home / "train.py").write_text(text)
        for name, content in files.items():
            (home / name).write_bytes(content)
        return compare(Plan(str(home), ("python", "train.py"), 8, 600), str(tmp_path), host, lambda _: None)

    return run


# In short: one script of each experiment. The rest is slow.
SHORT = {
    "ignore_index": ("loss", ("1 rank", "2 ranks"), "count="),
    "dropout by rank": ("modes", ("2 ranks",), "the same line on every rank"),
    "warm-up by a counter of its own": ("settings", ("2 ranks", "2 ranks, stopped and resumed"), "rt.steps"),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_mistake_is_found_with_its_step_and_what_to_write_instead(verify, name):
    kind, runs, instead = SHORT[name]
    result = verify(MISTAKES[name].text())
    first = result.differences[0]
    assert (first.kind, first.runs) == (kind, runs), format_verification("train.py", result)
    assert instead in format_verification("train.py", result)


def test_a_right_script_is_the_same_training_and_overwrites_no_file_of_its_folder(verify, tmp_path):
    writes = "torch.save(1, 'model.pt'); open('log', 'a').write('x'); open('log', 'w')"
    script = RIGHT["EMA"]._replace(tail=f"if hpcddp.env().rank == 0: {writes}")
    result = verify(script.text(), **{"model.pt": b"weights" * 2**20, "log": b"mine"})
    assert not result.differences, format_verification("train.py", result)
    assert result.resumes == (2, 4, 6)
    assert (tmp_path / "home/model.pt").read_bytes() == b"weights" * 2**20
    assert (tmp_path / "home/log").read_bytes() == b"mine"


PLAIN = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
ALONE = PLAIN.replace('dist.init_process_group("gloo")', "").replace("DistributedSampler(data)", "None")
ALONE = ALONE.replace("torch.nn.parallel.DistributedDataParallel", "")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (PLAIN, "", "on 2 ranks, gradients and weights are the same on both (8 steps)"),
        (PLAIN.replace("torch.nn.parallel.DistributedDataParallel", ""), "gradients", "is not wrapped"),
        (ALONE, "alone", "nothing could be compared"),
        (PLAIN.replace("optimizer.step()", "break"), "idle", "nothing could be compared"),
    ],
    ids=["right", "not wrapped", "no process group", "no step"],
)
def test_of_a_script_without_the_runtime_the_ranks_are_compared_or_it_is_said_that_they_cannot_be(
    verify, text, kind, says
):
    result = verify(text)
    assert [one.kind for one in result.differences] == ([kind] if kind else [])
    told = format_verification("train.py", result)
    assert says in told
    assert "rt." not in told


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(verify, name):
    assert verify(MISTAKES[name].text()).differences


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_right_script_raises_an_alarm(verify, name):
    result = verify(RIGHT[name].text())
    assert not result.differences, format_verification("train.py", result)


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_are_a_difference_and_not_a_hang(verify):
    script = scripts.Script(tail="if rt.rank == 0: torch.distributed.barrier()", inside="import torch.distributed")
    result = verify(script.text())
    assert any(one.kind in {"hang", "failed"} for one in result.differences)


# ---- what is said of a difference


def _events(share: float, *, lr: float = 0.1, off: float = 0.0, step: int = 0) -> list[dict]:
    place = {"opening": 0, "step": step}
    gradients = {"settings": [{"lr": lr}], "digest": "", "off": [[off, "weight", 1.0, 1.0]], "factor": 1.0}
    return [
        {"kind": "batch", "total": 10, "epoch": 0, **place},
        {"kind": "loss", "value": share, "share": share, **place},
        {"kind": "gradients", **gradients, **place},
    ]


def _trial(*ranks: list[dict]) -> TrialRecord:
    return TrialRecord("1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks", len(ranks), list(ranks))


@pytest.mark.parametrize(
    ("many", "kind"),
    [
        ([_events(0.5), _events(0.5)], None),
        ([_events(0.5), _events(0.5 + 2e-6)], None),
        ([_events(0.5), _events(0.51)], "loss"),
        ([_events(0.5), _events(0.5, off=1e-5)], None),
        ([_events(0.5), _events(0.5, off=1e-3)], "gradients"),
        ([_events(0.5), _events(0.5, lr=0.2)], "settings"),
        ([_events(0.5), _events(0.5)[:2]], "counts"),
        ([_events(0.5), []], "counts"),
    ],
)
def test_one_process_and_several_ranks_differ_by_more_than_rounding(many, kind):
    found = compare_trials(_trial(_events(1.0)), _trial(*many), ROUNDING)
    assert (found and found.kind) == kind


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Mismatch("loss", ("1 rank", "2 ranks"), (0, 0), factor=0.5, ranks=2, values=(1.0, 0.5)), "summed=True"),
        (Mismatch("loss", ("1 rank", "3 ranks"), (0, 0), factor=3.0, ranks=3, values=(1.0, 3.0)), "world_size"),
        (Mismatch("loss", ("1 rank", "2 ranks"), (0, 4), factor=0.9, ranks=2, values=(1.0, 0.9)), "rt.mean"),
        (Mismatch("settings", ("1 rank", "2 ranks"), (0, 0), "lr", (0.1, 0.2), ranks=2), "lr * rt.world_size"),
        (Mismatch("hang", ("2 ranks",), (0, 3), "rank 0 at train.py:9", ranks=2), "on one rank alone"),
        (Mismatch("counts", ("1 rank", "2 ranks"), (0, 1), "steps", (8, 6), ranks=2), "zip()"),
        (Mismatch("untrained", ("2 ranks", "2 ranks, stopped and resumed"), None, "a", (1.0, 2.0)), "rt.prepare"),
    ],
)
def test_a_difference_has_one_line_and_its_usual_causes(found, words):
    assert "\n" not in describe_mismatch(found)
    assert any(words in cause.cause + cause.instead for cause in list_causes(found))


def test_what_depends_on_the_batch_by_definition_is_said_beside_a_loss_that_differs():
    loss = Mismatch("loss", ("1 rank", "2 ranks"), (0, 0), values=(1.0, 0.9), factor=0.9, ranks=2)
    one = TrialRecord("1 rank", 1, [[{"kind": "end", "whole_batch": ["pairs"], "opening": 0, "step": 8}]])
    result = Verification((one,), (loss,), whole=True)
    assert "InfoNCE" in format_verification("train.py", result)
    assert verification_record("train.py", result)["by_definition"]


def test_printed_numbers_are_compared_and_other_words_are_not():
    one = "hpcddp: 1\nloss 1.00\nseed 3 a\nacc 0.5\n"
    assert find_other_numbers(one, "hpcddp: 2\nloss 1.0001\nseed 4 b\nacc 0.7\n") == ("acc 0.5", "acc 0.7")


def test_the_line_of_a_stack_is_the_scripts_own():
    stack = 'File "/x/site-packages/torch/a.py", line 3 in f\n  File "/home/me/train.py", line 9 in <module>\n'
    assert find_line_of_stack(stack) == "train.py:9"


def test_a_working_folder_has_copies_of_small_files_and_links_to_large_ones(tmp_path):
    (tmp_path / "a/data").mkdir(parents=True)
    (tmp_path / "a/data/small").write_text("x")
    with open(tmp_path / "a/large", "wb") as file:
        file.truncate(2**21)
    copy_folder(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not (tmp_path / "b/data/small").is_symlink()
    assert (tmp_path / "b/large").is_symlink()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "there is no command"),
        (["bash", "job.sh"], "runs a Python script"),
        (["python", "-c", "pass"], "runs a Python script"),
        (["python", "missing.py"], "there is no script missing.py"),
    ],
)
def test_anything_but_a_python_script_is_a_wrong_request(words, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--", *words]) == 2
    assert error in capsys.readouterr().err
