"""The run of a process that no job script started: the same on every rank, held by rank 0."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError, RequestError
from hpcddp.runs.chain import list_own_runs, list_starts, write_follow_up
from hpcddp.runs.choice import find_command
from hpcddp.runs.command import identify_command
from hpcddp.runs.folder import RunFolder, choose_attempt
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import HeldError, Holder, check_not_taken, describe_process, is_held_by, release_run, take_run
from hpcddp.runs.state import read_state, write_state
from hpcddp.training import opening
from hpcddp.training.opening import open_run
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.rendezvous.failure import PeerFailedError
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import Member
from hpcddp.training.torch_compat import HashStore, Store


def group_of(rank: int, store: Store) -> Group:
    members = tuple(Member(rank, "node1", 1, rank, "0", ()) for rank in range(2))
    return Group(rank, 2, "openmpi", "gloo", torch.device("cpu"), members, store)


def open_on_two_ranks(
    base: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str] | None = None, **options: object
) -> list[str | HpcddpError]:
    """What each of two ranks gets: its run's folder, in which rank 0's run ends as finished, or its error."""
    monkeypatch.setattr(opening, "_openings", itertools.repeat(0))
    asked = RuntimeOptions(run_dir=None if env else str(base), **options)  # type: ignore[arg-type]  # as given
    store = HashStore()
    found: list[str | HpcddpError] = ["", ""]

    def rank(number: int) -> None:
        folder = choose_attempt(env or {}, asked.run_dir)
        try:
            with open_run(folder, group_of(number, store), env or {}, asked) as (attempt, *_):
                assert attempt is not None
                found[number] = attempt.run.path
                if number == 0:
                    assert is_held_by(attempt.run, attempt.name)
                    write_state(attempt, "finished", step=1, epoch=1, reason="done")
        except HpcddpError as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_rank_0_stays_until_the_other_ranks_know_why_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_openings", itertools.repeat(0))
    waits_for: list[Callable[[], bool]] = []
    monkeypatch.setattr(opening, "wait_until", lambda is_so, _timeout_s: waits_for.append(is_so))
    (tmp_path / "file").touch()
    asked, store = RuntimeOptions(run_dir=str(tmp_path / "file/run")), HashStore()
    with pytest.raises(HpcddpError), open_run(choose_attempt({}, asked.run_dir), group_of(0, store), {}, asked):
        pass
    (all_know,) = waits_for
    assert not all_know()
    with pytest.raises(PeerFailedError), open_run(choose_attempt({}, asked.run_dir), group_of(1, store), {}, asked):
        pass
    assert all_know()


def test_a_finished_script_that_is_started_again_begins_a_run_of_its_own_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "train"
    assert open_on_two_ranks(base, monkeypatch) == [str(base)] * 2
    assert open_on_two_ranks(base, monkeypatch) == [f"{base}-2"] * 2
    assert open_on_two_ranks(base, monkeypatch, resume="train") == [str(base)] * 2
    assert open_on_two_ranks(base, monkeypatch, resume=False) == [f"{base}-3"] * 2
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"hpcddp: run {base}: new"
    assert second == f'hpcddp: run {base}-2: new, since train is finished (to resume that one: resume="train")'


def test_a_script_is_answered_in_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "train"
    os.makedirs(f"{base}/checkpoints")
    with open_run(choose_attempt({}, str(base)), group_of(0, HashStore()), {}, RuntimeOptions(run_dir=str(base))):
        assert capsys.readouterr().err.endswith("(a new run instead: resume=False)\n")
    missing, _ = open_on_two_ranks(base, monkeypatch, resume="none")
    assert str(missing).startswith(f'resume="none": there is no run {tmp_path}/none\nhint: one of: train')


def test_ranks_of_a_job_script_take_its_run_and_its_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(str(tmp_path / "train"))
    env = {"HPCDDP_RUN_DIR": run.path, "HPCDDP_ATTEMPT": "41"}
    take_run(run, describe_process("41", os.getppid(), {}, ()), lambda _scheduler, _job: None)
    assert open_on_two_ranks(tmp_path, monkeypatch, env) == [run.path] * 2
    assert is_held_by(run, "41")  # the job script lets it go
    assert open_on_two_ranks(tmp_path, monkeypatch, env) == [run.path] * 2  # finished, but not theirs to choose


def test_a_second_runtime_in_a_job_does_not_load_the_weights_of_the_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the next fold: it would train nothing."""
    run = RunFolder(str(tmp_path / "train"))
    env = {"HPCDDP_RUN_DIR": run.path, "HPCDDP_ATTEMPT": "41"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    _train(2)  # stops
    _train(2)  # goes on from there
    with pytest.raises(HpcddpError, match=r"has finished run .*train already, at step 6") as refused:
        _train(2)
    assert f'hpcddp.runtime(run_dir=f"{run.path}-{{n}}")' in str(refused.value.hint)
    assert read_state(run).status == "finished"
    _train(2, run_dir=f"{run.path}-1")
    assert read_state(RunFolder(f"{run.path}-1")).step == 5
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42")  # the next attempt may train more epochs
    _train(2)


def test_a_run_that_another_process_holds_is_refused_by_rank_0_and_reported_by_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(str(tmp_path / "train"))
    take_run(run, describe_process("41", os.getppid(), {}, ()), lambda _scheduler, _job: None)
    first, other = open_on_two_ranks(tmp_path / "train", monkeypatch)
    assert isinstance(first, HeldError)
    assert first.hint == "wait for its end, or a run of its own: resume=False, or another run_dir"
    assert isinstance(other, PeerFailedError)
    env = {"HPCDDP_RUN_DIR": run.path, "HPCDDP_ATTEMPT": "42"}  # an environment that no job script made
    assert isinstance(open_on_two_ranks(tmp_path, monkeypatch, env)[0], HeldError)


RunRanks = Callable[..., Any]


class Job:
    """A job under a supervisor, whose script chooses its runs itself."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._set = RunFolder(str(folder / "t")), monkeypatch.setenv

    def start(self, number: int, *, job: str = "7", restart: int = 0, by_hand: bool = False) -> None:
        """As the supervisor does on another host, before it starts the ranks."""
        holder = Holder(f"{job}.{number}", "login", "another", 8, "8", "slurm", job, by_hand=by_hand)
        if not restart:
            take_run(self.run, holder, lambda *_: "gone", before=f"{job}.{number - 1}")
            os.makedirs(self.run.attempt(holder.attempt).path)
        env = {"HPCDDP_RUN_DIR": self.run.path, "HPCDDP_ATTEMPT": holder.attempt, "SLURM_JOB_ID": job}
        for name, value in (env | {"TORCHELASTIC_RESTART_COUNT": str(restart)}).items():
            self._set(name, value)

    def end(self) -> None:
        release_run(self.run, os.environ["HPCDDP_ATTEMPT"], 0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("HPCDDP_LAUNCHER", "none")
    return Job(tmp_path, monkeypatch)


def _fold(
    base: Path,
    *,
    ends: str = "",
    lr: float = 0.1,
    number: float = 1.0,
    data: Dataset[Any] | None = None,
    **options: object,
) -> tuple[str, int, int]:
    """Train three steps, or until step 2. The run's name, its step at the end, and how many steps this start made."""
    made = 0
    model, read = torch.nn.Linear(2, 1), DataLoader(data or TensorDataset(torch.full((6, 2), number)), batch_size=2)
    with hpcddp.runtime(run_dir=str(base), save_every=1, **options) as rt:  # type: ignore[arg-type]  # as given
        model, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), read)
        for _ in rt.epochs(1):
            for (x,) in loader:
                made += 1
                rt.backward(model(x).sum())
                rt.step(optimizer)
                if ends == "lost" and made == 2:
                    raise KeyboardInterrupt
                if ends == "early" and made == 2:
                    rt.finish_early("it is good enough")
    assert rt.folder is not None
    return os.path.basename(rt.folder.run.path), rt.steps, made


def _lose(base: Path, **options: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fold(base, ends="lost", **options)


def test_a_start_of_the_same_job_goes_on_in_the_runs_that_the_job_has_begun(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a loss in the last fold costs the steps since its newest checkpoint, and none of the folds before."""
    job.start(1)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 3)
    _lose(tmp_path / "fold1", resume=False)
    job.start(2)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 0)
    assert _fold(tmp_path / "fold1", resume=False) == ("fold1", 3, 2)  # step 2 was not saved
    assert "fold0: finished by an earlier start of this job; no step is left\n" in capsys.readouterr().err
    assert read_state(RunFolder(str(tmp_path / "fold0"))).reason == "the training loop came to its end"
    job.end()
    job.start(1, job="8")
    assert _fold(tmp_path / "fold0") == ("fold0-2", 3, 3)  # as for a start by hand


def test_the_next_start_of_a_job_does_not_begin_its_run_anew_again(tmp_path: Path, job: Job) -> None:
    options = {"resume": False}
    job.start(1)
    _lose(tmp_path / "t", **options)
    assert os.path.isdir(f"{job.run.checkpoints}/step-00000001")
    job.start(2)
    assert _fold(tmp_path / "t", **options) == ("t", 3, 2)


def test_a_job_s_run_that_an_earlier_start_has_finished_lets_the_next_one_come_to_what_follows_it(
    tmp_path: Path, job: Job
) -> None:
    """As for a script that pretrains in the job's run, and tunes in one of its own."""
    job.start(1)
    assert _fold(tmp_path / "t", ends="early") == ("t", 2, 2)
    _lose(tmp_path / "tuned")
    assert [run.path for run in list_own_runs(job.run.attempt("7.1"))] == [str(tmp_path / "tuned")]
    job.start(2)
    assert _fold(tmp_path / "t") == ("t", 2, 0)
    assert _fold(tmp_path / "tuned") == ("tuned", 3, 2)


def test_a_run_that_finished_early_in_a_start_before_makes_no_more_steps(tmp_path: Path, job: Job) -> None:
    job.start(1)
    assert _fold(tmp_path / "fold0", ends="early") == ("fold0", 2, 2)
    job.start(2)
    assert _fold(tmp_path / "fold0", ends="early") == ("fold0", 2, 0)
    assert read_state(RunFolder(str(tmp_path / "fold0"))).reason == "it is good enough"


def test_one_of_several_runs_of_one_name_is_opened_by_the_next_start_only_if_it_is_named(
    tmp_path: Path, job: Job
) -> None:
    """A script that skips its finished folds would get the weights of another one."""
    job.start(1)
    assert _fold(tmp_path / "x")[0] == "x"
    _lose(tmp_path / "x")
    job.start(2)
    with pytest.raises(RequestError, match=r"have begun 2 runs of one run_dir, x, x-2, and nothing says") as refused:
        _fold(tmp_path / "x", resume=False)
    assert 'run_dir=f"runs/fold{k}"' in str(refused.value.hint)
    assert [_fold(tmp_path / "x", resume=name) for name in ("x", "x-2")] == [("x", 3, 0), ("x-2", 3, 2)]
    assert _fold(tmp_path / "x") == ("x-3", 3, 3)  # neither is left to be opened


def test_several_runs_of_one_name_that_a_job_has_begun_are_not_resumed_by_the_next_one_unless_named(
    tmp_path: Path, job: Job
) -> None:
    """A sweep in one script that was stopped in its second training: the first of the next job would go on in it."""
    job.start(1)
    assert _fold(tmp_path / "x") == ("x", 3, 3)
    _lose(tmp_path / "x")
    job.end()
    job.start(1, job="8")
    with pytest.raises(RequestError, match="job 7 has begun 2 runs of one run_dir, x, x-2, and nothing") as refused:
        _fold(tmp_path / "x")
    assert str(refused.value.hint).endswith('run_dir=f"runs/fold{k}"; or resume="x-2"')
    assert _fold(tmp_path / "x", resume=False) == ("x-3", 3, 3)
    assert _fold(tmp_path / "x", resume="x-2") == ("x-2", 3, 2)


def test_a_job_that_got_the_next_number_of_a_name_has_the_run_that_its_script_calls_so(
    tmp_path: Path, job: Job
) -> None:
    """As where the same command with `--name t` is submitted again after its run has finished."""
    job.start(1)
    assert _fold(tmp_path / "t") == ("t", 3, 3)
    job.run = RunFolder(str(tmp_path / "t-2"))
    job.start(1, job="8")
    write_object(job.run.plan, {"run_dir": "runs/t"})
    assert _fold(tmp_path / "t") == ("t-2", 3, 3)
    job.start(2, job="8")
    assert _fold(tmp_path / "t") == ("t-2", 3, 0)
    assert _fold(tmp_path / "u") == ("u", 3, 3)


def test_the_job_s_run_is_the_job_s_however_its_folder_is_written(tmp_path: Path, job: Job) -> None:
    job.start(1)
    (tmp_path / "link").symlink_to(tmp_path)
    assert _fold(tmp_path / "link" / "." / ".." / tmp_path.name / "t") == ("t", 3, 3)
    with pytest.raises(HpcddpError, match=r"this attempt has finished run .*t already"):
        _fold(tmp_path / "t" / ".." / "t")


def test_the_only_run_of_its_name_is_opened_by_the_next_start_and_others_are_begun(tmp_path: Path, job: Job) -> None:
    job.start(1)
    _lose(tmp_path / "x")
    job.start(2)
    assert [_fold(tmp_path / "x") for _ in range(2)] == [("x", 3, 2), ("x-2", 3, 3)]


def test_arguments_may_differ_between_the_starts_of_a_job(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a folder named after the attempt."""
    for number, opened in ((1, [("a", 3, 3), ("b", 3, 3)]), (2, [("a", 3, 0), ("b", 3, 0)])):
        job.start(number)
        monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "--scratch", f"/tmp/7.{number}"])
        assert [_fold(tmp_path / name) for name in ("a", "b")] == opened


def test_the_next_job_of_a_chain_goes_on_in_the_runs_that_the_ones_before_have_begun(tmp_path: Path, job: Job) -> None:
    for number, name in enumerate(("7", "8", "9")):
        job.start(1, job=name)
        write_object(job.run.attempt(f"{name}.1").chain, {"turn": number + 1, "of": 3, "step": 0})
        write_follow_up(job.run.attempt(f"{name}.1"), str(int(name) + 1))
        if name == "7":
            assert _fold(tmp_path / "t", ends="early") == ("t", 2, 2)
            _lose(tmp_path / "fold1", resume=False)
        else:
            assert _fold(tmp_path / "t") == ("t", 2, 0)
            assert _fold(tmp_path / "fold1", resume=False) == ("fold1", 3, 2 if name == "8" else 0)
        job.end()
    job.start(1, job="11")  # no job of the chain
    assert _fold(tmp_path / "fold1")[0] == "fold1-2"


def test_a_job_of_a_chain_that_was_killed_on_another_host_does_not_hold_the_run_of_its_script(
    tmp_path: Path, job: Job
) -> None:
    """Nobody can be asked here whether that job has ended: the next one of a chain starts after its end."""
    job.start(1)
    first = job.run.attempt("7.1")
    write_object(first.chain, {"turn": 1, "of": 3, "step": 0})
    write_follow_up(first, "8")
    run = RunFolder(str(tmp_path / "fold0"))
    lost = Holder(
        "7.1",
        "node1",
        "another",
        9,
        "9",
        "slurm",
        "7",
        identify_command(sys.orig_argv),
        by_hand=True,
        within=first.path,
    )
    take_run(run, lost, lambda *_: None)
    job.end()
    job.start(1, job="8")
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 3)
    with pytest.raises(HeldError):  # it lives on, and comes back
        check_not_taken(run, "7.1")


def test_a_finished_run_is_not_opened_by_other_arguments(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a shell's loop that skips the folds that it has the results of, lost before the next one began. In one
    whose order is shuffled not even the first one is left where it was lost."""
    job.start(1)
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "1"])
    assert _fold(tmp_path / "x") == ("x", 3, 3)
    job.start(2)
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "2"])
    assert _fold(tmp_path / "x") == ("x-2", 3, 3)
    job.start(3)
    assert _fold(tmp_path / "x") == ("x-2", 3, 0)
    _lose(tmp_path / "y")
    job.start(4)
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "1"])
    with pytest.raises(RequestError, match=r"has begun run .*y, and that was another training: optimizer's lr"):
        _fold(tmp_path / "y", lr=0.2)
    job.start(5)
    assert _fold(tmp_path / "y") == ("y", 3, 2)


def test_a_finished_run_is_not_opened_by_another_training_of_a_script_that_skips_it(tmp_path: Path, job: Job) -> None:
    job.start(1)
    assert _fold(tmp_path / "x") == ("x", 3, 3)
    job.start(2)
    with pytest.raises(RequestError, match=r"has begun run .*x, and that was another.* 0\.1 -> 0\.2") as refused:
        _fold(tmp_path / "x", lr=0.2)
    assert 'run_dir=f"runs/fold{k}"' in str(refused.value.hint)
    job.start(3)
    with pytest.raises(RequestError, match="another training: this TensorDataset is not the checkpoint's data"):
        _fold(tmp_path / "x", number=2.0)
    assert read_state(RunFolder(str(tmp_path / "x"))).status == "finished"
    job.start(4)
    assert _fold(tmp_path / "x") == ("x", 3, 0)


@pytest.mark.parametrize("is_part", [True, False], ids=["Subset", "tensors"])
def test_folds_that_begin_and_end_alike_are_other_trainings(tmp_path: Path, job: Job, *, is_part: bool) -> None:
    """Neighbours of a cross-validation have the first, the middle and the last sample in common."""
    everything = torch.arange(200.0).reshape(100, 2)

    def leave_out(fold: int) -> Dataset[Any]:
        rows = [row for row in range(100) if row // 10 != fold]
        return Subset(TensorDataset(everything), rows) if is_part else TensorDataset(everything[rows])

    job.start(1)
    assert _fold(tmp_path / "x", data=leave_out(1)) == ("x", 45, 45)
    job.start(2)
    words = "has other samples of its data set" if is_part else "is not the checkpoint's data, some of its samples"
    with pytest.raises(RequestError, match=rf"that was another training: this \w+ {words}"):
        _fold(tmp_path / "x", data=leave_out(2))
    job.start(3)
    assert _fold(tmp_path / "x", data=leave_out(1)) == ("x", 45, 0)


def test_a_start_that_was_refused_a_run_leaves_it_to_its_command(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next job would find the other training in it, as that of its own command."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "1"])
    job.start(1)
    _lose(tmp_path / "x")
    job.start(2)
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "2"])
    with pytest.raises(RequestError, match="another training: this TensorDataset"):
        _fold(tmp_path / "x", number=2.0)
    job.end()
    job.start(1, job="8")
    assert _fold(tmp_path / "x", number=2.0) == ("x-2", 3, 3)
    monkeypatch.setattr(sys, "orig_argv", ["python", "fold.py", "1"])
    assert _fold(tmp_path / "x") == ("x", 3, 2)


def test_a_finished_run_that_a_script_resumes_by_its_name_makes_no_more_steps(tmp_path: Path, job: Job) -> None:
    job.start(1)
    _lose(tmp_path / "x")
    job.end()
    job.start(1, job="8")
    assert _fold(tmp_path / "x", resume="x", ends="early") == ("x", 3, 2)
    job.start(2, job="8")
    assert _fold(tmp_path / "x", resume="x", ends="early") == ("x", 3, 0)


@pytest.mark.parametrize("name", ["x", "t"], ids=["own run", "job's run"])
def test_the_next_training_of_a_script_does_not_go_on_in_one_that_it_has_lost(
    tmp_path: Path, job: Job, name: str
) -> None:
    """A sweep whose first learning rate diverges would train the second one from its weights."""
    job.start(1)
    _lose(tmp_path / name)
    with pytest.raises(RequestError, match=r"another training: optimizer's lr 0\.1 -> 0\.2"):
        _fold(tmp_path / name, lr=0.2)
    assert _fold(tmp_path / name, lr=0.2, override=["lr"]) == (name, 3, 2)


def test_a_run_that_has_kept_its_checkpoint_s_settings_is_the_same_training_in_the_next_start(
    tmp_path: Path, job: Job
) -> None:
    job.start(1)
    _lose(tmp_path / "t")
    job.start(1, job="8")
    assert _fold(tmp_path / "t", lr=0.2) == ("t", 3, 2)  # 0.1 is in force, which is said
    job.start(2, job="8")
    assert _fold(tmp_path / "t", lr=0.2) == ("t", 3, 0)


def test_a_finished_run_that_is_opened_again_refuses_other_trainings_on_every_rank_and_has_sums(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("own_run_bodies:start_four_times", 2, str(tmp_path)).check()
    for rank in range(2):
        first, again, other_data, other_lr = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (first, again) == ([2, 2, 8], [2, 0, 8])
        assert "this TensorDataset is not the checkpoint's data" in other_data
        assert "optimizer's lr 0.1 -> 0.4" in other_lr


def test_programs_and_arguments_tell_runs_of_one_name_apart(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: str) -> tuple[str, int, int]:
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        return _fold(tmp_path / "x")

    job.start(1)
    assert start("before.py") == ("x", 3, 3)
    job.start(2)  # begins where the one before was lost
    assert start("t.py", "1") == ("x-2", 3, 3)
    assert start("t.py", "2") == ("x-3", 3, 3)
    job.start(3)
    assert start("t.py", "2") == ("x-3", 3, 0)
    assert start("t.py", "3") == ("x-4", 3, 3)
    assert start("t.py", "1") == ("x-2", 3, 0)


def test_what_a_script_names_is_opened_by_each_start(tmp_path: Path, job: Job) -> None:
    job.start(1)
    assert [_fold(tmp_path / "x")[0] for _ in range(2)] == ["x", "x-2"]
    job.start(2)
    assert _fold(tmp_path / "x", resume="x-2") == ("x-2", 3, 0)


def test_ranks_that_torchrun_has_started_again_go_on_in_the_runs_of_their_attempt(tmp_path: Path, job: Job) -> None:
    job.start(1)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 3)
    _lose(tmp_path / "fold1")
    job.start(1, restart=1)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 0)
    assert _fold(tmp_path / "fold1") == ("fold1", 3, 2)


def test_a_launch_that_is_typed_again_after_the_one_before_has_ended_begins_new_runs(tmp_path: Path, job: Job) -> None:
    job.start(1, by_hand=True)
    _fold(tmp_path / "fold0")
    job.end()
    job.start(2, by_hand=True)
    assert _fold(tmp_path / "fold0") == ("fold0-2", 3, 3)
    job.start(3, by_hand=True)  # by its supervisor: nobody said that start 2 has ended
    assert _fold(tmp_path / "fold0") == ("fold0-2", 3, 0)


def test_an_attempt_that_was_on_a_host_that_is_lost_does_not_hold_the_run_of_its_script(
    tmp_path: Path, job: Job
) -> None:
    """Rank 0 of the next attempt is on another host, and cannot look for its process."""
    run, ask_nobody = RunFolder(str(tmp_path / "fold0")), lambda *_: None
    job.start(1)
    within = list_starts(job.run.attempt("7.1"))[0].path
    lost = Holder("7.1", "node1", "another", 9, "9", "slurm", "7", by_hand=True, within=within)
    take_run(run, lost, ask_nobody)
    again = lost._replace(host="node2", process=10)
    with pytest.raises(HeldError):  # another program of the same start
        take_run(run, again, ask_nobody)
    job.start(2)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 3)
    with pytest.raises(HeldError):  # it was cut off, and has come back
        check_not_taken(run, "7.1")


def _lose_the_run(run: RunFolder, error: Exception | None) -> None:
    """Another attempt takes the run after the first step, and ends."""
    model = torch.nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    with hpcddp.runtime(run_dir=run.path, save_every=1) as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = rt.prepare(model, optimizer, data)
        for _ in rt.epochs(1):
            for (x,) in loader:
                rt.backward(model(x).sum())
                rt.step(optimizer)
                if rt.steps == 1:
                    mine = rt.folder.name
                    take_run(run, describe_process("other", os.getpid(), {}, ()), lambda *_: None, before=mine)
                    write_state(run.attempt("other"), "finished", step=7, epoch=1, reason="it went on")
                    if error is not None:
                        raise error


@pytest.mark.parametrize("error", [None, ValueError("of the loop")], ids=["saves", "fails"])
def test_an_attempt_whose_run_was_taken_writes_nothing_more(tmp_path: Path, error: ValueError | None) -> None:
    """Its script was killed, and the ranks lived on: another attempt resumed the run meanwhile."""
    run = RunFolder(str(tmp_path))
    told = "was taken by attempt other on" if error is None else "of the loop"
    with pytest.raises(HeldError if error is None else ValueError, match=told):
        _lose_the_run(run, error)
    assert read_state(run).reason == "it went on"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert is_held_by(run, "other")


def _train(width: int, **options: object) -> None:
    model, data = torch.nn.Linear(2, width), DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    with hpcddp.runtime(save_every=1, **options) as rt:  # type: ignore[arg-type]  # as given
        model, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for _ in rt.epochs(2):
            for (x,) in loader:
                rt.backward(model(x).sum())
                rt.step(optimizer)
                if rt.steps == 4:
                    rt.stop("far enough")


def test_a_resume_that_does_not_fit_leaves_the_run_to_its_command_and_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other, run = ["python", "a.py"], ["python", "b.py"], RunFolder(str(tmp_path / "a"))
    monkeypatch.setattr(sys, "orig_argv", mine)
    _train(2, run_dir=run.path)
    stopped = read_state(run)
    monkeypatch.setattr(sys, "orig_argv", other)
    with pytest.raises(HpcddpError, match="does not fit"):
        _train(3, run_dir=run.path, resume="a")
    failed = read_state(run)
    assert (failed.status, failed.step, failed.epoch) == ("failed", stopped.step, stopped.epoch)
    assert stopped.step > 3
    assert find_command(run) == tuple(mine)
    _train(2, run_dir=run.path, resume="a")
    assert find_command(run) == tuple(other)
    assert read_state(run).status == "finished"
    monkeypatch.setattr(sys, "orig_argv", mine)
    with pytest.raises(HpcddpError, match="does not fit"):
        _train(3, run_dir=run.path, resume="a")
    assert (read_state(run).status, find_command(run)) == ("finished", tuple(other))


SCRIPT = """import hpcddp
with hpcddp.runtime(global_batch=4, run_dir="own"):
    raise ZeroDivisionError
"""


def start_script(folder: Path, **more: str) -> tuple[int, str]:
    """Exit status and stderr of a user's script that opens a runtime."""
    (folder / "own.py").write_text(SCRIPT)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **more}
    done = subprocess.run([sys.executable, "own.py"], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_variable_that_is_wrong_ends_a_script_in_two_lines(tmp_path: Path) -> None:
    """Which values are wrong: test_progress.py."""
    assert start_script(tmp_path, HPCDDP_PROGRESS="abc") == (
        2,
        "hpcddp: HPCDDP_PROGRESS is 'abc', which is no number of seconds above 0\nhint: HPCDDP_PROGRESS=30, or off\n",
    )


@pytest.mark.slow
def test_a_held_run_ends_a_script_in_two_lines_and_its_own_errors_keep_their_traceback(tmp_path: Path) -> None:
    status, told = start_script(tmp_path)
    assert (status, told.splitlines()[-1].endswith("ZeroDivisionError")) == (1, True)
    assert "Traceback" in told
    run = RunFolder(str(tmp_path / "own"))
    take_run(run, describe_process("41", os.getppid(), {}, ()), lambda _scheduler, _job: None)
    status, told = start_script(tmp_path)
    first, second = told.splitlines()
    assert (status, first.startswith("hpcddp: run own is in use by attempt 41")) == (4, True)
    assert second == "hint: wait for its end, or a run of its own: resume=False, or another run_dir"


FOLDS = """
import signal, sys, torch, hpcddp
from torch.utils.data import DataLoader, TensorDataset
for fold in range(3):
    data = TensorDataset(torch.ones(40, 2) * fold)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcddp.runtime(4, **({"run_dir": f"runs/fold{fold}"} if "own" in sys.argv else {})) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, 4))
        for epoch in rt.epochs(1):
            for number, (x,) in enumerate(loader):
                rt.backward(model(x).mean())
                rt.step(optimizer)
                if number == 2:
                    signal.raise_signal(signal.SIGTERM)
    print("fold", fold, rt.steps)
"""


@pytest.mark.parametrize("where", ["job", "own"])
def test_a_signal_that_has_stopped_one_training_begins_no_other(tmp_path: Path, where: str) -> None:
    (tmp_path / "folds.py").write_text(FOLDS)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    env |= {"HPCDDP_RUN_DIR": f"{tmp_path}/runs/j", "HPCDDP_ATTEMPT": "7.1"}
    words = [sys.executable, "folds.py", where]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hpcddp: the script ends here: it was stopped (SIGTERM) in the run before" in done.stderr
    assert done.stdout.splitlines()[-1] == "fold 0 4"
    state = read_state(RunFolder(str(tmp_path / "runs" / ("fold0" if where == "own" else "j"))))
    assert state is not None
    assert (state.status, state.step) == ("unfinished", 4)
    assert not (tmp_path / "runs/fold1").exists()
