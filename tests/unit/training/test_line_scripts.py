"""The scripts of benchmarks/lines: the hpcddp version gives what plain.py gives on any number of ranks, and no warning.

For the comparison the data are read in order (hpcddp shuffles in its own way), noise is computed from the data, and the
forward pass is in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch

KINDS = ("classifier", "gan", "language_model", "mixed_precision", "metrics", "stream")
SAME = 1e-5  # weights in float32: sums of several ranks and micro batches are rounded in another order
COMPARABLE = {
    "shuffle=True": "shuffle=False",
    "torch.randn(len(real), 4, device=device)": "real.tanh() @ torch.ones(2, 4)",
    "dtype=torch.float16": "enabled=False",
}

Weights = dict[str, torch.Tensor]
Train = Callable[..., Weights]
_plain: dict[str, Weights] = {}


@pytest.fixture
def train(run_ranks, repo, tmp_path) -> Train:
    """train(kind, version, ranks, changes): run the script with these changes of its text;
    the weights that it saves, or {}.

    Fails if a rank fails or warns.
    """

    def run(kind: str, version: str, ranks: int, changes: dict[str, str], env: dict[str, str] | None = None) -> Weights:
        text = (repo / f"benchmarks/lines/{kind}/{version}.py").read_text(encoding="utf-8")
        for old, new in changes.items():
            text = text.replace(old, new)
        saved = tmp_path / "model.pt"
        saved.unlink(missing_ok=True)
        script = tmp_path / f"{version}.py"
        script.write_text(text, encoding="utf-8")
        outcome = run_ranks(
            "script_bodies:run_script", ranks, {"script": str(script), "folder": str(tmp_path)}, env=env
        )
        errors = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(ranks))
        assert outcome.statuses == [0] * ranks, "\n".join([*outcome.outputs, errors])
        assert warnings_in(errors) == []
        return torch.load(saved) if saved.exists() else {}

    return run


def warnings_in(text: str) -> list[str]:
    """Lines that say that something is not as it should be: by Python, hpcddp or torch's C++ (`[W1122 …`)."""
    return [line for line in text.splitlines() if re.search(r"warn|deprecat|error|^\[[WE]\d", line, re.IGNORECASE)]


def difference(some: Weights, others: Weights) -> float:
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)


@pytest.fixture
def plain(train) -> Callable[[str], Weights]:
    """The weights of a kind's plain.py, trained once."""

    def weights_of(kind: str) -> Weights:
        if kind not in _plain:
            _plain[kind] = train(kind, "plain", 1, COMPARABLE)
        return _plain[kind]

    return weights_of


def cases() -> list[object]:
    """Every kind on 1, 2 and 3 ranks; one of them in short tests."""
    short = {("language_model", 2)}
    every = [(kind, ranks) for kind in KINDS for ranks in (1, 2, 3)]
    return [pytest.param(*case, marks=[] if case in short else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(("kind", "ranks"), cases())
def test_a_script_gives_the_weights_of_one_plain_process_without_a_warning(train, plain, kind, ranks):
    assert difference(train(kind, "with_hpcddp", ranks, COMPARABLE), plain(kind)) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_runs_as_it_stands(train, kind):
    train(kind, "with_hpcddp", 2, {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_stopped_before_its_deadline_resumes_on_another_number_of_ranks(train, plain, tmp_path, kind):
    run_dir = tmp_path / "run"

    def status() -> str:
        return json.loads((run_dir / "state.json").read_text())["status"]

    env = {"HPCDDP_RUN_DIR": str(run_dir)}
    assert train(kind, "with_hpcddp", 2, COMPARABLE, env | {"HPCDDP_DEADLINE": "1"}) == {}
    assert status() == "unfinished"
    resumed = train(kind, "with_hpcddp", 3, COMPARABLE, env)
    assert status() == "finished"
    assert difference(resumed, plain(kind)) < SAME
