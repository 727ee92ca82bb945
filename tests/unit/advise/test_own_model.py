"""`hpcddp advise FILE.py:FUNCTION`: what runs of the file, what its model takes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.advise.source import load_function
from hpcddp.cli.main import main
from hpcddp.errors import RequestError

SCRIPT = """
import sys
import nowhere_to_be_found
from collections import namedtuple
WIDTH = 3
WIDTH += 1
def helper(): return namedtuple("Net", "width")
def make_model(): return helper()(WIDTH)
print("training")
sys.exit("it trains")
if __name__ == "__main__":
    WIDTH = 0
"""


def test_only_the_function_and_what_it_needs_runs(tmp_path: Path, capsys) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert load_function(str(file), "make_model")().width == 4
    assert capsys.readouterr().out == ""
    for name, what in (
        ("make_modle", "did you mean 'make_model'"),
        ("WIDTH", "no function"),
    ):
        with pytest.raises(RequestError, match=what):
            load_function(str(file), name)
    file.write_text("import nowhere_to_be_found\ndef f(): return nowhere_to_be_found\n")
    with pytest.raises(RequestError, match="cannot run: ModuleNotFoundError"):
        load_function(str(file), "f")


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

def make_model():
    print("made")
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    return nn.Sequential(nn.Embedding(100, 64), blocks, nn.Linear(64, 100))

def make_none(): pass

def make_wrong(): raise ValueError("no such width")
model = nn.Linear(2, 2)

raise SystemExit("this line must not run")
"""


@pytest.mark.torch_compat
def test_a_model_of_a_script_is_measured_without_its_weights(tmp_path: Path, capsys) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "train.py"
    file.write_text(MODEL)
    asked = ["--gpu-memory", "80GB", "--ranks-per-node", "2", "--sequence", "32", "--precision", "fp32"]
    assert main(["advise", f"{file}:make_model", *asked, "--max-micro-batch", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    block = 2 * 64 * 256 + 64 + 256
    assert found["model"]["parameters"] == 3 * block + 64 * 100 + 64 * 100 + 100
    assert (found["model"]["blocks"], found["model"]["block_class"]) == (3, "Block")
    # each block keeps its input and what relu gives; its backward pass adds both gradients of relu
    kept = 4 * 32 * 4 * (3 * (64 + 256) + 64 + 2 * 256)
    assert found["splits"][0]["activations_bytes"] == pytest.approx(kept, rel=1e-3)
    for name, what in (
        ("make_none", "returned NoneType, not a torch.nn.Module"),
        ("make_wrong", "ValueError: no such"),
    ):
        assert main(["advise", f"{file}:{name}", *asked]) == 2
        assert what in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"model in .* is no function"):
        load_function(str(file), "model")
    assert main(["advise", f"{file}:make_model", *asked[:4], "--input", "3,8,8"]) == 2
    message, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "the model cannot be trained on its input" in message
    assert hint.endswith("; token numbers: --sequence 1024; others: --input 3,224,224")


ODD = """
import argparse, sys, torch
from torch import nn
parser = argparse.ArgumentParser()
ARGS = parser.parse_args()
if len(sys.argv) > 1: LEFT = sys.exit("no data")
else: LEFT = sys.exit("no arguments")

class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(-x if x.mean().item() > 0 else x)

def of_file(): return nn.Linear(ARGS.width, 4)
def needs(width): return nn.Linear(width, 4)
def ends(): sys.exit("no weights here")
def ends_in_file(): return LEFT
def branch(): return Branch(8, 8)
class Broken(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.nope
def broken(): return Broken(8, 8)
def frozen(): return nn.Linear(8, 8).requires_grad_(False)
"""


@pytest.mark.torch_compat
def test_what_cannot_be_asked_of_a_model_without_numbers_is_refused_in_two_lines(tmp_path: Path, capsys) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    asked = ["--gpu-memory", "80GB", "--input", "8", "--precision", "fp32"]
    for name, what, hint in (
        ("of_file", "AttributeError: 'Namespace' object has no", "of_file is called without arguments"),
        ("needs", "needs() raised TypeError: needs() missing 1 required", "needs is called without arguments"),
        ("ends", "ends() raised SystemExit: no weights here", "ends is called without arguments"),
        ("ends_in_file", "cannot run: SystemExit: no arguments", "see line 7 of"),
        ("branch", "the model's forward pass reads numbers", "leave out what reads them, such as .item()"),
        ("broken", "AttributeError: 'Broken' object has no", "numbers of shape (1, 8); the error is at "),
        ("frozen", "has nothing to train", "in frozen: requires_grad_(True)"),
    ):
        assert main(["advise", f"{file}:{name}", *asked]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2, said
        assert what in said[0]
        assert hint in said[1]


RECURRENT = """
from torch import nn

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.LSTM(8, 128, 2, batch_first=True), nn.Linear(128, 8)
    def forward(self, x):
        return self.last(self.first(x)[0])
"""


@pytest.mark.torch_compat
def test_an_lstm_keeps_four_gates_its_cell_and_what_it_gives(tmp_path: Path, capsys) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "recurrent.py"
    file.write_text(RECURRENT)
    line = f"advise {file}:Reader --input 8,8 --precision fp32 --max-micro-batch 256 --gpu-memory 80GB --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)["splits"][0]["activations_bytes"]
    of_layers = 4 * 256 * 8 * 2 * 128
    # for the backward pass: the gates, the cell and its tanh, the output; the operators hold their sums besides
    assert 7 * of_layers < found < 14 * of_layers
