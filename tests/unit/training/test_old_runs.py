"""Run folders of hpcddp 0.1 are always resumed; those of a newer hpcddp are refused and stay as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hpcddp
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.predict import predict_environment
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import SCHEMAS, NewerFileError
from hpcddp.runs.record import read_run
from hpcddp.runs.state import read_state
from hpcddp.training.rendezvous.store_address import agree_on_store_address

_OLD = Path(__file__).parents[2] / "captures" / "runs-0.1"
KINDS = ("single", "sharded", "async", "exact", "chain")
RunRanks = Any


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    """Copies of one run folder for each kind of checkpoint."""
    return {name: Path(shutil.copytree(_OLD / name, tmp_path / name)) for name in KINDS}


def _manifest(run: Path) -> Any:
    return json.loads(max(run.glob("checkpoints/step-*/manifest.json")).read_text())


def _resume(run_ranks: RunRanks, world_size: int, runs: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    argument = {"runs": {name: str(run) for name, run in runs.items()}, "out": str(tmp_path / "loaded")}
    run_ranks("old_bodies:resume_all", world_size, argument, env={"HPCDDP_ATTEMPT": "now"}).check()
    return json.loads((tmp_path / "loaded").read_text())


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_kind_of_checkpoint_gives_its_weights_back_and_the_training_continues_as_it_would_have(
    run_ranks: RunRanks, runs: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    undisturbed = read_run(str(runs["single"])).steps
    ends = {name: json.loads((run / "state.json").read_text())["weights_sha256"] for name, run in runs.items()}
    shutil.rmtree(runs["async"] / "checkpoints" / "step-00000006")  # its last two steps are made again
    ends["async"] = json.loads((runs["sharded"] / "state.json").read_text())["weights_sha256"]
    loaded = _resume(run_ranks, world_size, runs, tmp_path)
    assert {name: found["sha256"] for name, found in loaded.items()} == ends
    assert {name: found["step"] for name, found in loaded.items()} == dict.fromkeys(KINDS, 4) | {"single": 6}
    for name, path in runs.items():
        state, record = read_state(RunFolder(str(path))), read_run(str(path))
        assert (state.status, state.step) == ("finished", 6), name
        assert record.unrecorded == []
        for step, line in undisturbed.items():
            assert record.steps[step].loss == pytest.approx(line.loss, rel=1e-5), (name, step)
            assert record.steps[step].lr == pytest.approx(line.lr), (name, step)
        if name != "single":  # it was finished
            assert _manifest(path)["schema"] == 1
            assert json.loads((path / "run.json").read_text())["schema"] == 1


def test_a_newer_checkpoint_is_refused_and_not_set_aside_as_a_damaged_one(
    run_ranks: RunRanks, runs: dict[str, Path], tmp_path: Path
) -> None:
    path = runs["sharded"] / "checkpoints" / "step-00000004" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": SCHEMAS[path.name] + 1}))
    argument = {"runs": {"sharded": str(runs["sharded"])}, "out": str(tmp_path / "loaded")}
    outcome = run_ranks("old_bodies:resume_all", 2, argument, env={"HPCDDP_ATTEMPT": "now"})
    told = "".join(outcome.outputs)
    assert 0 not in outcome.statuses
    assert f"{path} was written by a newer hpcddp: its schema version is 2, this hpcddp knows 1" in told
    assert "hint: upgrade hpcddp" in told
    left = sorted(entry.name for entry in (runs["sharded"] / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000004"]


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below it; None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


_ATTEMPT = "local-20261121T235117-3322"


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "newer",
    [
        "run.json",
        "plan.json",
        "state.json",
        "checkpoints/step-00000004/manifest.json",
        "checkpoints/step-00000006/manifest.json",
        "checkpoints/best.json",
        *(f"attempts/{_ATTEMPT}/{name}" for name in ("metrics.jsonl", "versions.json", "data.json", "options.json")),
    ],
)
def test_a_run_with_a_newer_file_is_refused_and_every_byte_of_it_stays(
    runs: dict[str, Path], newer: str, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without resume too: the checkpoints of the new training would push the newer one out."""
    run = runs["single"]
    path = run / newer
    with path.open("a" if newer.endswith(".jsonl") else "w") as file:
        file.write(json.dumps({"kind": "start", "schema": SCHEMAS[path.name] + 1}) + "\n")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(run))
    monkeypatch.setenv("HPCDDP_ATTEMPT", _ATTEMPT)
    before = _contents(run)
    with pytest.raises(NewerFileError, match=r"was written by a newer hpcddp"):
        _train_two_steps(resume=resume)
    assert _contents(run) == before


def _train_two_steps(*, resume: bool) -> None:
    with hpcddp.runtime(global_batch=8, seed=3, resume=resume, save_every=1, keep=1) as rt:
        loader = rt.loader(TensorDataset(torch.zeros(16, 4), torch.zeros(16)))
        model = torch.nn.Linear(4, 2)
        model, optimizer = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in rt.epochs(1):
            for x, _ in loader:
                rt.backward(model(x).sum(), summed=True)
                rt.step(optimizer)


def test_a_newer_file_that_is_found_later_does_not_make_the_run_a_failed_one(runs: dict[str, Path]) -> None:
    state = runs["single"] / "state.json"
    before = state.read_bytes()
    with pytest.raises(NewerFileError), hpcddp.runtime(global_batch=8, run_dir=str(runs["single"])):
        raise NewerFileError("manifest.json was written by a newer hpcddp", "upgrade hpcddp")
    assert state.read_bytes() == before


def test_a_newer_run_folder_is_refused_before_rank_0_writes_its_address_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": SCHEMAS["run.json"] + 1}))
    env = predict_environment("mpich", ["node1", "node2"], [1, 1], 0) | {"PBS_JOBID": "17"}
    launch = Launch(env | {"HPCDDP_RUN_DIR": str(tmp_path)}, "node1")
    with pytest.raises(NewerFileError, match=r"run\.json was written by a newer hpcddp"):
        agree_on_store_address(launch, "file", "opening-0", 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
