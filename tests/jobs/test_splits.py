"""What the pictures and the costs of docs/strategies.md say of each split is so on ranks that train."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from hpcddp import guard
from tests.jobs.splits import KINDS, LAYERS, WORDS, Part, held, samples

SIDE, BATCH = 8, 16  # of count_split.py
GUARD = next(iter(guard.__path__))  # as under hpcddp exec: gloo may abort at a program's end without it
TRAINED = [kind for kind in KINDS if kind.parallel is not None]


def numbers_in(part: Part | None) -> list[int]:
    """Which elements of a matrix are in the part, counted row by row."""
    if part is None:
        return []
    rows = range(round(part.top * SIDE), round(part.bottom * SIDE))
    columns = range(round(part.left * SIDE), round(part.right * SIDE))
    return [row * SIDE + column for row in rows for column in columns]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.name)
def test_ranks_that_train_hold_and_send_what_the_page_says(kind, repo, run, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(kind.hosts))]
    env = {**os.environ, "PYTHONPATH": f"{GUARD}:{repo}", "OMP_NUM_THREADS": "1"}
    done = run([*launch, str(Path(__file__).with_name("count_split.py")), kind.name, str(tmp_path)], env=env)
    assert done.returncode == 0, done.stderr
    for rank in range(len(kind.hosts)):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        shown = held(kind, rank)
        assert found["numbers"] == [numbers_in(part) for part in shown["weights"]], rank
        for name, shapes in shown.items():
            sizes = [
                part and [round((part.bottom - part.top) * SIDE), round((part.right - part.left) * SIDE)]
                for part in shapes
            ]
            assert found[name] == sizes, (rank, name)
        assert tuple(found["data"]) == samples(kind, rank)
        assert found["carried"] == expected_calls(kind, found["elements"])


@pytest.mark.slow
@pytest.mark.multirank
def test_an_inner_rank_of_the_pipeline_sends_what_the_page_says(repo, run, tmp_path):
    (kind,) = (kind for kind in KINDS if kind.name == "pipeline")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    count, job = str(Path(__file__).with_name("count_sends.py")), str(repo / "jobs/plain/pipeline.py")
    env = {**os.environ, "PYTHONPATH": GUARD, "OMP_NUM_THREADS": "1"}
    done = run([*launch, count, str(tmp_path), job, "--epochs", "1", "--batch", "64"], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shapes = json.loads((tmp_path / "1.json").read_text())
    sent = sum(samples * width for samples, width in (shape for shape in shapes if len(shape) == 2))
    values = {"A": 64 * 20, "W": 3}
    assert sent == 1024 / 64 * sum(exchange.bytes_sent(values) for exchange in kind.exchanges)  # the steps of an epoch


def expected_calls(kind, elements: int) -> dict[str, float]:
    """Elements in the calls of each collective, as the page's formula has them."""
    split, calls = kind.split, {}
    values = {"P": elements, "A": BATCH // split.data_size * SIDE, "L": LAYERS / 2, "W": len(kind.hosts)}
    values |= {"S": len(split.rows[0]), "C": len(split.rows), "T": split.tensor}
    for exchange in kind.exchanges:
        calls[exchange.call] = calls.get(exchange.call, 0) + exchange.bytes_in_call(values)
    return calls


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_formula_that_is_shown_is_the_one_that_is_computed(kind):
    values = {"P": 4e9, "A": 3e6, "L": 32, "W": 32, "S": 8, "C": 4, "T": 2}
    assert values.keys() == WORDS.keys()
    shown = re.sub(r"(?<=[\w)]) (?=[A-Z(])", " * ", kind.formula)
    computed = sum(exchange.bytes_sent(values) for exchange in kind.exchanges)
    assert eval(shown, {}, values) == pytest.approx(computed)  # a formula of this file's constants


def test_the_costs_are_those_of_the_literature():
    """Rajbhandari et al., ZeRO, section 7: with P bytes of gradients DDP moves 2 P, ZeRO-3 moves 3 P."""
    sent = {kind.name: kind.formula for kind in KINDS}
    assert sent["ddp"] == "2 P (W - 1) / W"
    assert sent["fsdp"] == "3 P (S - 1) / S"
    assert sent["hsdp"] == "3 P (S - 1) / S + 2 P / S (C - 1) / C"


def test_the_pictures_are_those_that_the_splits_give(repo):
    spec = importlib.util.spec_from_file_location("make_splits", repo / "docs/make_splits.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    drawn = {f"{kind.name}.svg": maker.draw(kind) for kind in KINDS}
    shown = {path.name: path.read_text(encoding="utf-8") for path in (repo / "docs/splits").glob("*.svg")}
    assert shown == drawn, "python docs/make_splits.py"
