"""`hpcddp compare` on runs of the real trainer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli.main import main

pytestmark = pytest.mark.xdist_group("compare")  # one worker trains what the tests of this file share

SMALL = ["--image-size", "8", "--model", "shufflenet_v2_x0_5", "--global-batch", "8"]
Train = Callable[..., Path]
Compare = Callable[..., "tuple[int, dict[str, Any], str]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def train(run_ranks: Any, home: Path) -> Train:
    """A run folder with one attempt, attempt-0; made once for all tests of this file."""

    def go(name: str, options: Sequence[str] = ("--limit-steps", "3"), ranks: int = 1, status: int = 0) -> Path:
        folder = home / name
        if not folder.exists():
            small = SMALL[2:] if "--image-size" in options else SMALL
            argument = [*small, "--run-dir", str(folder), *options]
            outcome = run_ranks("train_reference", ranks, argument, env={"HPCDDP_ATTEMPT": "attempt-0"})
            assert outcome.statuses == [status] * ranks, outcome.outputs
        return folder

    return go


@pytest.fixture
def copy_of(train: Train, tmp_path: Path) -> Callable[[], Path]:
    """A run folder to change or to damage."""
    return lambda: shutil.copytree(train("first"), tmp_path / "copy")


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """Exit status, JSON facts and text of a comparison."""

    def go(first: Path, second: Path) -> tuple[int, dict[str, Any], str]:
        status = main(["compare", "--json", str(first), str(second)])
        facts = json.loads(capsys.readouterr().out)
        assert main(["compare", str(first), str(second)]) == status
        return status, facts, capsys.readouterr().out

    return go


def test_another_seed_differs_from_step_1_on(train: Train, compare: Compare) -> None:
    status, facts, text = compare(train("first"), train("seed", ["--limit-steps", "3", "--seed", "7"]))
    assert (status, facts["verdict"], facts["first_difference"]["step"]) == (1, "different", 1)
    assert facts["differing_steps"] == 3
    assert facts["weights"]["differ_at"] == [3]
    assert text.startswith("different from step 1 on\n")


def test_another_learning_rate_differs_after_the_first_update(train: Train, compare: Compare) -> None:
    status, facts, _ = compare(train("first"), train("lr", ["--limit-steps", "3", "--lr", "0.06"]))
    assert (status, facts["first_difference"]["step"]) == (1, 2)


def test_a_run_is_the_same_as_far_as_it_goes_and_when_it_has_gone_on(
    train: Train, compare: Compare, run_ranks: Any
) -> None:
    first, chain = train("first"), train("chain", ["--limit-steps", "1"])
    status, facts, text = compare(first, chain)
    assert (status, facts["verdict"], facts["common_steps"], facts["last_steps"]) == (0, "same so far", 1, [3, 1])
    assert text.startswith("the same as far as both go: 1 step\n")
    assert f"{chain} ends at step 1" in text
    assert "no step of which both recorded them" in text
    argument = [*SMALL, "--run-dir", str(chain), "--limit-steps", "2"]
    run_ranks("train_reference", 1, argument, env={"HPCDDP_ATTEMPT": "attempt-1"}).check()
    status, facts, _ = compare(first, chain)
    assert (status, facts["verdict"], facts["last_steps"]) == (0, "same", [3, 3])


@pytest.mark.slow
def test_steps_that_were_made_again_after_a_kill_count_as_made_again(
    train: Train, compare: Compare, run_ranks: Any
) -> None:
    killed = train("killed", ["--limit-steps", "3", "--save-every", "1"])
    shutil.rmtree(killed / "checkpoints" / "step-00000003")  # as if killed before it was written
    (killed / "state.json").unlink()
    metrics = killed / "attempts" / "attempt-0" / "metrics.jsonl"
    before, *lost = metrics.read_text().partition('{"kind": "step", "step": 3,')
    step = "".join(lost).splitlines()[0]
    metrics.write_text(before + step.replace('"loss": 2', '"loss": 7') + '\n{"kind": "st')
    argument = [*SMALL, "--run-dir", str(killed), "--limit-steps", "1", "--save-every", "1"]
    run_ranks("train_reference", 1, argument, env={"HPCDDP_ATTEMPT": "attempt-0"}).check()  # requeued: the same attempt
    status, facts, _ = compare(train("first"), killed)
    assert (status, facts["verdict"]) == (0, "same")


@pytest.mark.slow
def test_a_plain_run_on_two_ranks_differs(train: Train, compare: Compare) -> None:
    status, facts, _ = compare(train("first"), train("two", ranks=2))
    assert (status, facts["first_difference"]["step"]) == (1, 1)


def _change_loss(copy: Path, value: Callable[[float], float | None]) -> None:
    """Of step 2; and half a line at the end, as of a kill."""
    (metrics,) = copy.glob("attempts/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    second = next(line for line in lines if line.get("step") == 2)
    second["loss"] = value(second["loss"])
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "step": 4, "lo')


def test_one_ulp_of_one_loss_is_a_difference_and_no_number_equals_no_number_only(
    train: Train, compare: Compare, copy_of: Callable[[], Path]
) -> None:
    copy = copy_of()
    _change_loss(copy, lambda loss: math.nextafter(loss, 9.0))
    status, facts, _ = compare(train("first"), copy)
    assert (status, facts["first_difference"]["step"]) == (1, 2)
    assert facts["differing_steps"] == 1
    _change_loss(copy, lambda _: None)
    assert compare(copy, copy)[1]["verdict"] == "same"
    assert compare(train("first"), copy)[1]["differing_steps"] == 1


def test_weights_alone_can_differ(train: Train, compare: Compare, copy_of: Callable[[], Path]) -> None:
    copy = copy_of()
    for path in (copy / "checkpoints" / "step-00000003" / "manifest.json", copy / "state.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": "0" * 64}))
    status, facts, text = compare(train("first"), copy)
    assert (status, facts["verdict"], facts["first_difference"]) == (1, "different", None)
    assert text.startswith("different: all losses of 3 steps are equal, but the weights of step 3 are not\n")


def _refused(capsys: pytest.CaptureFixture[str], *runs: Path) -> list[str]:
    assert main(["compare", *map(str, runs)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")
    return lines


def test_what_is_no_run_folder_is_refused(train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = train("first")
    assert _refused(capsys, first, tmp_path / "nowhere")[0].endswith("nowhere is no folder")
    assert "is no run folder: it has no attempts/" in _refused(capsys, first, tmp_path)[0]
    assert str(first) in _refused(capsys, first.parent, first)[1]
    (tmp_path / "attempts").mkdir()
    assert "has no step" in _refused(capsys, first, tmp_path)[0]


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("state.json", "[]", "state.json holds no JSON object"),
        ("checkpoints/step-00000003/manifest.json", "", "manifest.json cannot be read"),
    ],
)
def test_a_damaged_file_is_named(
    copy_of: Callable[[], Path], capsys: pytest.CaptureFixture[str], file: str, content: str, told: str
) -> None:
    copy = copy_of()
    (copy / file).write_text(content, encoding="latin-1")
    assert told in _refused(capsys, copy, copy)[0]


def test_runs_without_a_common_step_are_refused(
    train: Train, copy_of: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of()
    (metrics,) = copy.glob("attempts/*/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"step": ', '"step": 9'))
    assert "no step is in both runs" in _refused(capsys, train("first"), copy)[0]
