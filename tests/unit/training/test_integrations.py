"""A loop of its own, with hpcddp.integrations.loop: its ranks stop at one step, save, and resume."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import hpcddp.integrations
from hpcddp.errors import LaunchError, RequestError
from hpcddp.integrations.hf_trainer import TransformersHooks
from hpcddp.integrations.lightning_trainer import LightningHooks, name_random_state, restore_random_state
from hpcddp.integrations.plain_loop import open_loop
from hpcddp.integrations.ranks import check_all_ranks
from hpcddp.integrations.saved import FrameworkCheckpoint, check_world, complete_checkpoint, find_saved
from hpcddp.integrations.saved import make_partial as begin_checkpoint
from hpcddp.runs.chain import Link, decide_start
from hpcddp.runs.folder import RunFolder, list_checkpoints
from hpcddp.runs.lock import HeldError, describe_process, take_run
from hpcddp.runs.metrics import LossCurve, read_latest
from hpcddp.runs.state import RunState, read_state
from hpcddp.training.activity import is_at_files
from hpcddp.training.arguments import SaveEvery
from hpcddp.training.checkpoint import resume
from hpcddp.training.checkpoint.files import find_fault
from hpcddp.training.data.randomness import read_states
from hpcddp.training.stopping import STOP_SIGNALS, SignalFlag

RunRanks = Callable[..., Any]
STEPS = 12


def begin(run_ranks: RunRanks, folder: Path, size: int, attempt: str = "a", **argument: Any) -> Any:
    env = {"HPCDDP_RUN_DIR": str(folder / "run"), "HPCDDP_ATTEMPT": attempt} | argument.pop("env", {})
    asked = {"folder": str(folder), "steps": STEPS} | argument
    return run_ranks("integration_bodies:loop", size, asked, env=env)


def found(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def state(folder: Path) -> RunState:
    read = read_state(RunFolder(str(folder / "run")))
    assert read is not None
    return read


def saved(folder: Path) -> list[str]:
    return [Path(path).name for path in list_checkpoints(str(folder / "run/checkpoints"))]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the loop of an attempt of one rank, in this process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def open_alone(attempt: str = "a", env: dict[str, str] | None = None, **options: Any) -> Any:
        place = {"HPCDDP_RUN_DIR": str(tmp_path / "run"), "HPCDDP_ATTEMPT": attempt}
        return open_loop(place | (env or {}), **{"global_batch": None, "save_every": None, "keep": 2} | options)

    yield open_alone
    for number, handler in before.items():
        signal.signal(number, handler)


def save(folder: Path) -> None:
    (folder / "0.txt").write_text("whole")


def train(opened: Any, until: int = STEPS) -> int:
    """Make the steps that are left; where it had resumed."""
    with opened as run:
        for step in range(run.step + 1, until + 1):
            run.after_step(step, save)
    return int(run.step)


@pytest.mark.torch_compat
def test_a_signal_to_one_rank_stops_all_after_one_step_and_the_next_attempt_goes_on_there(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    begin(run_ranks, tmp_path, 2, signal=[1, 3, "SIGUSR1"]).check()
    assert found(tmp_path, 2) == [{"made": [1, 2, 3, 4], "stopped": True, "resumed": None}] * 2
    assert (state(tmp_path).status, state(tmp_path).step, state(tmp_path).reason) == ("unfinished", 4, "SIGUSR1")
    assert not decide_start([state(tmp_path)], Link("a", 1, 0), again=False, ended_well=False).reason
    outcome = begin(run_ranks, tmp_path, 2, "b", fail=[1, "save"], options={"save_every": 6})
    assert "OSError: no room" in outcome.outputs[1]
    assert saved(tmp_path) == ["step-00000004"]
    assert (state(tmp_path).status, state(tmp_path).step) == ("failed", 4)
    begin(run_ranks, tmp_path, 2, "c").check()
    resumed = [4, ["0.txt", "1.txt", "manifest.json"]]
    assert found(tmp_path, 2) == [{"made": list(range(5, STEPS + 1)), "stopped": False, "resumed": resumed}] * 2
    assert (state(tmp_path).status, state(tmp_path).step, state(tmp_path).attempt) == ("finished", STEPS, "c")


def test_ranks_that_count_different_steps_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = begin(run_ranks, tmp_path, 2, fail=[1, "count"])
    assert "the ranks count different steps: one is at step 1, another is at step 2" in outcome.outputs[0]
    assert state(tmp_path).status == "failed"
    outcome = begin(run_ranks, tmp_path, 2, "b", fail=[1, "leaves"])
    assert "the ranks count different steps: one has left the loop, another is at step 5" in outcome.outputs[0]
    assert state(tmp_path).status == "failed"


def test_a_loop_before_the_process_group_is_refused(tmp_path: Path, alone: Callable[..., Any]) -> None:
    with pytest.raises(LaunchError, match="in one of 2 ranks before their process group was there"):
        train(alone(env={"WORLD_SIZE": "2"}))
    with pytest.raises(LaunchError, match="HPCDDP_RUN_DIR and HPCDDP_ATTEMPT are not set"):
        train(alone(env={"HPCDDP_ATTEMPT": ""}))
    assert not (tmp_path / "run").exists()


def test_one_rank_stops_at_once_and_ignores_what_comes_later(alone: Callable[..., Any], tmp_path: Path) -> None:
    with alone() as run:
        run.after_step(1, save)
        signal.raise_signal(signal.SIGTERM)
        run.after_step(2, save)
        pytest.fail("the loop was not left")
    signal.raise_signal(signal.SIGTERM)
    assert (state(tmp_path).status, state(tmp_path).step, state(tmp_path).reason) == ("unfinished", 2, "SIGTERM")
    assert train(alone("b")) == 2


def test_the_deadline_stops_and_says_so(alone: Callable[..., Any], tmp_path: Path) -> None:
    train(alone(env={"HPCDDP_DEADLINE": str(time.time())}))
    assert (state(tmp_path).status, state(tmp_path).step, state(tmp_path).reason) == ("unfinished", 1, "deadline")


def test_what_stands_behind_a_loop_that_was_stopped_does_not_run(
    alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.runs.start.is_interactive", lambda: False)
    with pytest.raises(SystemExit) as ended:
        train(alone(env={"HPCDDP_DEADLINE": str(time.time())}))
    assert ended.value.code == 0


def test_step_speed_and_loss_are_recorded_as_a_trainer_logs_them(alone: Callable[..., Any], tmp_path: Path) -> None:
    attempt = RunFolder(str(tmp_path / "run")).attempt("a")
    curve = LossCurve()
    with alone(global_batch=8) as opened:
        hooks, control = TransformersHooks(opened._run), SimpleNamespace(should_save=False)
        hooks.on_train_begin(None, SimpleNamespace(max_steps=40), control)
        for step in range(1, 31):
            hooks.on_step_end(None, SimpleNamespace(global_step=step, max_steps=40, epoch=step / 20), control)
            if step % 10 == 0:  # logging_steps
                hooks.on_log(None, None, control, logs={"loss": 1 / step, "learning_rate": 0.1, "epoch": step / 20})
            hooks.on_log(None, None, control, logs={"eval_loss": 9.0})
        seen = read_latest(attempt.metrics)
        assert (seen.step, seen.total, seen.epoch, seen.loss) == (30, 40, 1, pytest.approx(1 / 30))
        assert seen.samples_per_s is not None
        for step in (31, 32):
            hooks.on_step_end(None, SimpleNamespace(global_step=step, max_steps=40, epoch=step / 20), control)
    seen = read_latest(attempt.metrics)  # the last step, and the last loss that is known
    assert (seen.step, seen.loss) == (32, pytest.approx(1 / 30))
    curve.read([attempt])
    assert (list(curve.steps), curve.made["a"]) == ([10, 20, 30], (10, 32))


def test_a_rank_that_saves_is_at_work_whoever_writes(alone: Callable[..., Any], tmp_path: Path) -> None:
    """The disk may let it wait for long: see hpcddp.training.watchdog."""
    asked = list[bool]()

    def save_and_ask(folder: Path) -> None:
        asked.append(is_at_files())
        save(folder)

    with alone(save_every=6) as loop:
        for step in range(1, 8):
            loop.after_step(step, save_and_ask)
        run = loop._run
        framework = TransformersHooks(run)
        assert not is_at_files()
        framework.on_epoch_end(None, None, SimpleNamespace(should_save=True))
        assert is_at_files()
        run.framework_saved(str(tmp_path), 7, 1)
        assert not is_at_files()
    assert asked == [True]


def test_an_error_in_the_loop_is_the_reason_in_the_state(alone: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sense"), alone():
        raise ValueError("no sense")
    assert (state(tmp_path).status, state(tmp_path).reason) == ("failed", "rank 0: ValueError: no sense")


def test_a_checkpoint_that_is_not_whole_is_named_and_the_one_before_is_taken(
    alone: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(alone(save_every=6))
    newest = tmp_path / "run/checkpoints/step-00000012"
    (newest / "0.txt").write_text("")
    assert train(alone("b", save_every=1, keep=1), until=8) == 6
    assert f"checkpoint {newest} is damaged (0.txt has 0 bytes" in capsys.readouterr().err
    assert saved(tmp_path) == ["step-00000008"], "the damaged one does not count as one to keep"


def test_a_checkpoint_of_something_else_is_refused_and_stays(alone: Callable[..., Any], tmp_path: Path) -> None:
    train(alone(save_every=6))
    newest = tmp_path / "run/checkpoints/step-00000012"
    with pytest.raises(RequestError, match=r"was written by a loop of its own, not by hpcddp\.runtime"):
        find_fault(newest)


def test_a_frameworks_folder_that_another_run_has_written_over_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "trained/checkpoint-4"
    shared.mkdir(parents=True)
    facts = {"framework": "F", "epoch": 0, "world_size": 2, "global_batch": 8, "seconds": 1.0, "path": str(shared)}
    runs = [RunFolder(str(tmp_path / name)) for name in ("x", "x-2")]
    for run in runs:
        (shared / "weights").write_text(run.path[-3:])
        begin_checkpoint(run.attempt("a"), 4)
        complete_checkpoint(run.attempt("a"), 4, 2, facts)
    with pytest.raises(RequestError, match=rf"\({shared} was written over by another run\): the run has no other one"):
        find_saved(runs[0], "F")
    found = find_saved(runs[1], "F")
    assert found is not None
    assert (found.step, found.path) == (4, str(shared))


class Disk:
    """Answers the question for the size of `0.txt` with an error."""

    def __init__(self) -> None:
        self._stat = os.stat

    def stat(self, path: Any, **options: Any) -> os.stat_result:
        if Path(path).name == "0.txt":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return self._stat(path, **options)


def test_a_checkpoint_that_a_host_cannot_read_is_no_damage(
    alone: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(alone(save_every=6))
    with monkeypatch.context() as away:
        away.setattr(os, "stat", Disk().stat)
        away.setattr(resume, "PAUSES_S", ())
        with pytest.raises(
            LaunchError, match=r"cannot read checkpoint .*step-00000012, which stays as it is"
        ) as refused:
            train(alone("b"))
    assert os.uname().nodename in refused.value.message
    assert train(alone("b")) == 12


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(alone: Callable[..., Any], tmp_path: Path) -> None:
    train(alone(save_every=6))
    for path in list_checkpoints(str(tmp_path / "run/checkpoints")):
        (Path(path) / "0.txt").unlink()
    with pytest.raises(RequestError, match="the run has no other one to resume from"):
        train(alone("b"))
    assert len(saved(tmp_path)) == 2


def test_another_batch_is_refused_until_it_is_accepted_and_cannot_be_kept(
    alone: Callable[..., Any], tmp_path: Path
) -> None:
    train(alone(save_every=6, global_batch=8))
    for env in ({}, {"HPCDDP_KEEP": "global_batch"}):
        with pytest.raises(
            RequestError, match="global_batch: 8 -> 16\nhint: --accept global_batch takes the new; a run"
        ):
            train(alone("b", env, global_batch=16))
    assert train(alone("c", {"HPCDDP_ACCEPT": "global_batch"}, global_batch=16)) == 12
    recorded = json.loads((tmp_path / "run/settings.json").read_text())["settings"]
    assert recorded["run"]["global_batch"] == 16
    assert recorded["run"]["command"]


def test_another_number_of_ranks_is_refused_unless_a_step_has_as_many_samples() -> None:
    two = FrameworkCheckpoint(path="x", step=4, epoch=0, world_size=2, global_batch=8, seconds=1.0, damaged={})
    assert check_world(two, 2, 8) is None
    assert check_world(two._replace(global_batch=None), 2, None) is None
    line = check_world(two, 1, 8)
    assert line is not None
    assert line.startswith("warning: resumed from step 4 of 2 ranks on 1 rank: as many samples per step")
    with pytest.raises(RequestError, match=r"2 ranks, and here are 4 ranks: the loop counts batches per rank"):
        check_world(two, 4, None)
    with pytest.raises(RequestError, match="DeepSpeed's optimizer is saved per rank"):
        check_world(two, 1, 8, fixed="DeepSpeed's optimizer is saved per rank")


def test_lightning_with_deepspeed_is_refused_on_another_number_of_ranks_whatever_the_batch(tmp_path: Path) -> None:
    two = FrameworkCheckpoint(path="x", step=4, epoch=0, world_size=2, global_batch=8, seconds=1.0, damaged={})
    hooks = LightningHooks({}, RunFolder(str(tmp_path / "run")).attempt("a"), two, SignalFlag(), SaveEvery())
    trainer = SimpleNamespace(strategy=type("DeepSpeedStrategy", (), {})())
    with pytest.raises(RequestError, match="2 ranks, and here are 1 rank: DeepSpeed's optimizer is saved per rank"):
        hooks.setup(trainer, None, "fit")


def test_a_run_that_is_taken_while_a_checkpoint_is_written_gets_none(alone: Callable[..., Any], tmp_path: Path) -> None:
    def save_slowly(folder: Path) -> None:
        save(folder)
        take_run(RunFolder(str(tmp_path / "run")), describe_process("b", os.getpid(), {}, ()), lambda *_: None)

    with pytest.raises(HeldError), alone(save_every=1) as run:
        run.after_step(1, save_slowly)
    assert saved(tmp_path) == []


def test_a_trainer_that_found_fewer_ranks_is_refused() -> None:
    with pytest.raises(LaunchError, match="the trainer has 1 of the 2 ranks that were started"):
        check_all_ranks({"WORLD_SIZE": "2"}, "the trainer", 1, "use all ranks")
    check_all_ranks({"WORLD_SIZE": "2"}, "the trainer", 2, "use all ranks")


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import hpcddp, sys; hpcddp.integrations.loop; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_attach_takes_trainers_alone() -> None:
    with pytest.raises(RequestError, match="takes a Trainer of transformers or Lightning, not a Linear"):
        hpcddp.integrations.attach(torch.nn.Linear(1, 1))


def test_the_random_state_of_a_rank_comes_back(tmp_path: Path) -> None:
    torch.save(tuple(read_states()), name_random_state(tmp_path, 3))
    drawn = [torch.rand(2).tolist(), random.random(), numpy.random.rand()]
    restore_random_state(name_random_state(tmp_path, 2))  # there is none
    restore_random_state(name_random_state(tmp_path, 3))
    assert [torch.rand(2).tolist(), random.random(), numpy.random.rand()] == drawn
