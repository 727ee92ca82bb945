"""The run that a script opens: its folder, the same on every rank, held by rank 0; and what a start has left to do."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp import uncaught
from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.runs.chain import list_opened, write_follow_up
from hpcddp.runs.folder import RunFolder, choose_attempt
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import HeldError, Holder, check_not_taken, describe_process, is_held_by, take_run
from hpcddp.runs.start import opening_once
from hpcddp.runs.state import read_state, write_state
from hpcddp.training import opening
from hpcddp.training.opening import open_run
from hpcddp.training.rendezvous.failure import PeerFailedError
from hpcddp.training.rendezvous.group import Group, Member
from hpcddp.training.torch_compat import HashStore, Store

RunPython = Callable[..., Any]


def group_of(rank: int, store: Store) -> Group:
    members = tuple(Member(rank, "node1", 1, rank, "0", ()) for rank in range(2))
    return Group(rank, 2, "openmpi", "gloo", torch.device("cpu"), members, store)


def open_on_two_ranks(
    base: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str] | None = None
) -> list[str | HpcddpError]:
    """What each of two ranks gets: its run's folder, in which rank 0's run ends as finished, or its error."""
    store, both = HashStore(), threading.Barrier(2)
    told: list[Any] = [None, None]
    found: list[str | HpcddpError] = ["", ""]

    def ask_all(mine: Any, _ranks: int) -> list[Any]:
        told[int(threading.current_thread().name)] = mine
        both.wait()
        return told

    def rank(number: int) -> None:
        folder = choose_attempt(env or {}, None if env else str(base))
        try:
            with open_run(folder, group_of(number, store), env or {}) as (attempt, *_):
                assert attempt is not None
                found[number] = attempt.run.path
                if number == 0:
                    assert is_held_by(attempt.run, attempt.name)
                    write_state(attempt, "finished", step=1, epoch=1, reason="done")
        except HpcddpError as error:
            found[number] = error

    monkeypatch.setattr(opening, "ask_all", ask_all)
    threads = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_has_the_folder_that_was_named_in_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "train"
    for line in ("new", "begins again, without a checkpoint"):
        assert open_on_two_ranks(base, monkeypatch) == [str(base)] * 2
        assert capsys.readouterr().err == f"hpcddp: run {base}: {line}\n"


def test_ranks_of_a_job_script_take_its_run_and_its_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(str(tmp_path / "train"))
    env = {"HPCDDP_RUN_DIR": run.path, "HPCDDP_ATTEMPT": "41"}
    take_run(run, describe_process("41", os.getppid(), {}, ()), lambda _scheduler, _job: None)
    assert open_on_two_ranks(tmp_path, monkeypatch, env) == [run.path] * 2
    assert is_held_by(run, "41")  # the job script lets it go


def test_a_run_that_another_process_holds_is_refused_by_rank_0_and_reported_by_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(str(tmp_path / "train"))
    take_run(run, describe_process("41", os.getppid(), {}, ()), lambda _scheduler, _job: None)
    first, other = open_on_two_ranks(tmp_path / "train", monkeypatch)
    assert isinstance(first, HeldError)
    assert first.hint == "wait for its end; or a run of its own: --name X, or another run_dir"
    assert isinstance(other, PeerFailedError)
    env = {"HPCDDP_RUN_DIR": run.path, "HPCDDP_ATTEMPT": "42"}  # an environment that no job script made
    assert isinstance(open_on_two_ranks(tmp_path, monkeypatch, env)[0], HeldError)


class Job:
    """A job under a supervisor, whose script names folders of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._set = RunFolder(str(folder / "t")), monkeypatch.setenv

    def start(self, number: int, *, job: str = "7", fresh: str = "") -> None:
        """As the supervisor does on another host, before it starts the ranks."""
        holder = Holder(f"{job}.{number}", "login", "another", 8, "8", "slurm", job)
        take_run(self.run, holder, lambda *_: "gone")
        os.makedirs(self.run.attempt(holder.attempt).path)
        env = {"HPCDDP_RUN_DIR": self.run.path, "HPCDDP_ATTEMPT": holder.attempt, "SLURM_JOB_ID": job}
        for name, value in (env | {"HPCDDP_FRESH": fresh}).items():
            self._set(name, value)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("HPCDDP_LAUNCHER", "none")
    return Job(tmp_path, monkeypatch)


def _fold(base: Path | None, *, ends: str = "", epochs: int = 1) -> tuple[str, int, int]:
    """Train three steps an epoch, or until step 2. The run's name, its step at the end, and the steps of this start."""
    made = 0
    model, data = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    with hpcddp.runtime(run_dir=base and str(base), save_every=1) as rt:
        model, optimizer, loader = rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for _ in rt.epochs(epochs):
            for (x,) in loader:
                made += 1
                optimizer.zero_grad()
                rt.backward(model(x).sum())
                optimizer.step()
                if ends == "lost" and made == 2:
                    raise KeyboardInterrupt
                if ends == "early" and made == 2:
                    rt.finish_early("it is good enough")
    assert rt.folder is not None
    return os.path.basename(rt.folder.run.path), rt.steps, made


def _lose(base: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fold(base, ends="lost")


def test_a_finished_run_goes_on_only_if_a_larger_number_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = tmp_path / "x"
    assert [_fold(x, epochs=count) for count in (2, 2, 4, 3)] == [("x", 6, 6), ("x", 6, 0), ("x", 12, 6), ("x", 12, 0)]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"hpcddp: run {x}: ")]
    assert re.search(
        r"finished at step 6 on \d{4}-\d\d-\d\d \(.*\); no step is left of the 2 epochs asked for; to begin anew:"
        " another run_dir$",
        lines[1],
    )
    state = read_state(RunFolder(str(x)))
    assert state is not None
    assert (state.status, state.asked) == ("finished", {"epochs": 4})


def test_an_early_stop_that_is_started_again_makes_no_step(tmp_path: Path) -> None:
    assert _fold(tmp_path / "x", ends="early", epochs=2) == ("x", 2, 2)
    assert _fold(tmp_path / "x", ends="early", epochs=2) == ("x", 2, 0)
    state = read_state(RunFolder(str(tmp_path / "x")))
    assert state is not None
    assert (state.reason, state.asked) == ("it is good enough", {"epochs": 2})
    assert _fold(tmp_path / "x", epochs=3) == ("x", 8, 6)  # the epoch that it has left is over


def test_a_name_error_behind_a_run_that_had_no_turn_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uncaught, "_replaced", None)  # as in a process that has opened no runtime yet
    monkeypatch.setattr(uncaught, "_lines", [])
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: print(error, file=sys.stderr))
    monkeypatch.setattr(uncaught, "_replaced", None)  # as at a process's start
    ends = []
    for epochs in (1, 1):
        _fold(tmp_path / "x", epochs=epochs)
        capsys.readouterr()
        sys.excepthook(NameError, NameError("name 'loss' is not defined"), None)
        sys.excepthook(ValueError, ValueError("another"), None)
        ends.append("its loop had no turn" in capsys.readouterr().err)
    assert ends == [False, True]


def test_each_start_of_a_job_comes_to_the_folders_by_their_names(tmp_path: Path, job: Job) -> None:
    """So a loss in the last fold costs the steps since its newest checkpoint, and none of the folds before."""
    job.start(1)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 3)
    _lose(tmp_path / "fold1")
    assert [run.path for run in list_opened(job.run.attempt("7.1"))] == [
        str(tmp_path / name) for name in ("fold0", "fold1")
    ]
    job.start(2)
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 0)
    assert _fold(tmp_path / "fold1") == ("fold1", 3, 2)  # step 2 was not saved
    job.start(1, job="8")
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 0)  # a command typed again is the same


def test_fresh_sets_each_folder_that_ranks_name_aside_once(tmp_path: Path, job: Job) -> None:
    job.start(1)
    assert _fold(tmp_path / "fold") == ("fold", 3, 3)
    job.start(1, job="8", fresh="20261126T0255-1a2b")
    _lose(tmp_path / "fold")
    job.start(2, job="8", fresh="20261126T0255-1a2b")
    assert _fold(tmp_path / "fold") == ("fold", 3, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fold", "fold.old1", "t"]


def test_one_script_opens_a_folder_once(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(1)
    monkeypatch.setattr("hpcddp.runs.start.is_interactive", lambda: False)
    for base in (None, tmp_path / "x"):
        _fold(base)
        with pytest.raises(RequestError, match="its second training would load the weights of the first") as refused:
            _fold(base)
        name = tmp_path / "t" if base is None else base
        assert f'hpcddp.runtime(run_dir=f"{name}-{{n}}")' in str(refused.value.hint)


def test_a_notebook_opens_its_folder_again_once_it_is_closed(tmp_path: Path) -> None:
    _lose(tmp_path / "x")
    assert _fold(tmp_path / "x") == ("x", 3, 2)
    y = str(tmp_path / "y")
    with opening_once(RunFolder(y)), pytest.raises(RequestError, match="opened run"), hpcddp.runtime(2, run_dir=y):
        pass


def test_an_attempt_on_a_host_that_is_lost_does_not_hold_the_folder_of_its_script(tmp_path: Path, job: Job) -> None:
    """Rank 0 of the next attempt, or of the chain's next job, is on another host, and cannot look for its process."""
    run = RunFolder(str(tmp_path / "fold0"))
    job.start(1)
    take_run(run, Holder("7.1", "node1", "another", 9, "9", "slurm", "7"), lambda *_: None)
    job.start(2)
    _lose(tmp_path / "fold0")
    with pytest.raises(HeldError):  # it was cut off, and has come back
        check_not_taken(run, "7.1")
    take_run(run, Holder("7.3", "node1", "another", 9, "9", "slurm", "7"), lambda *_: None)
    write_object(job.run.attempt("7.2").chain, {"attempt": "7.2", "turn": 1, "step": 0, "of": 5})
    write_follow_up(job.run.attempt("7.2"), "8")
    job.start(1, job="8")
    assert _fold(tmp_path / "fold0") == ("fold0", 3, 2)


@pytest.mark.parametrize("name", ["run.json", "settings.json", "state.json"])
def test_a_file_of_the_run_that_finds_the_disk_full_ends_the_start_and_the_next_one_does_what_is_left(
    tmp_path: Path, name: str
) -> None:
    """/dev/full in the place of the new file says so without a disk that is full, and without root."""
    x = tmp_path / "x"
    x.mkdir()
    (x / f".{name}.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(LaunchError, match=r"the run folder .*x cannot be written: no space left on device") as full:
        _fold(x)
    assert full.value.hint.startswith("make room there, or")
    assert _fold(x)[:2] == ("x", 3)


def _lose_the_run(run: RunFolder) -> None:
    """Another attempt takes the run after the first step, and ends."""
    model = torch.nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    with hpcddp.runtime(run_dir=run.path, save_every=1) as rt:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = rt.prepare(model, optimizer, data)
        for _ in rt.epochs(1):
            for (x,) in loader:
                optimizer.zero_grad()
                rt.backward(model(x).sum())
                optimizer.step()
                if rt.steps == 1:
                    mine = rt.folder.name
                    take_run(run, describe_process("other", os.getpid(), {}, ()), lambda *_: None, before=mine)
                    write_state(run.attempt("other"), "finished", step=7, epoch=1, reason="it went on")


def test_an_attempt_whose_run_was_taken_writes_nothing_more(tmp_path: Path) -> None:
    """Its script was killed, and the ranks lived on: another attempt resumed the run meanwhile."""
    run = RunFolder(str(tmp_path))
    with pytest.raises(HeldError, match="was taken by attempt other on"):
        _lose_the_run(run)
    assert read_state(run).reason == "it went on"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert is_held_by(run, "other")


FOLDS = """
import json, os, signal, sys, torch, hpcddp
from torch.utils.data import DataLoader, TensorDataset
ends, scores, weights = os.environ["ENDS"], [], []
for fold in range(2):
    torch.manual_seed(fold)
    x = torch.randn(20, 2) + fold
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    name = f"fold{fold}"
    with hpcddp.runtime(run_dir=None if "job" in sys.argv else f"runs/{name}", save_every=2) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, data)
        for epoch in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(((model(x) - y) ** 2).mean())
                optimizer.step()
                if rt.steps == 5 and ends.startswith(name):
                    os.kill(os.getpid(), getattr(signal, ends.split()[1]))
    scores.append(float(model(torch.ones(1, 2))))
    weights += [one.tolist() for one in model.parameters()]
    print(name, rt.steps, flush=True)
print(json.dumps([weights, sum(scores) / len(scores)]))
"""


@pytest.mark.parametrize("where", ["job", "folds", "bare"])
def test_a_stop_in_time_ends_the_script_behind_its_with_block_and_the_job_begins_no_other_training(
    tmp_path: Path, run_python: RunPython, where: str
) -> None:
    """What stands there may print the mean of the folds, with the number of the fold before in place of this one's."""
    (tmp_path / "folds.py").write_text(FOLDS)
    env = {"ENDS": "fold0 SIGTERM"}
    if where != "bare":
        env |= {"HPCDDP_RUN_DIR": f"{tmp_path}/runs/j", "HPCDDP_ATTEMPT": "7.1"}
        (tmp_path / "runs/j/attempts/7.1").mkdir(parents=True)  # as the supervisor does
    done = run_python(tmp_path, "folds.py", where, **env)
    assert (done.returncode, done.stdout) == (85 if where == "bare" else 0, ""), done.stderr
    assert done.stderr.endswith("hpcddp: the script ends here: the run stopped (SIGTERM)\n")
    state = read_state(RunFolder(str(tmp_path / "runs" / ("j" if where == "job" else "fold0"))))
    assert state is not None
    assert (state.status, state.step) == ("unfinished", 6)
    if where == "folds":  # the next process of a script such as `python folds.py; python folds.py`
        done = run_python(tmp_path, "folds.py", where, **env)
        told = "hpcddp: no training begins: the job stopped (SIGTERM) in run runs/fold0\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, "", told)
    assert not (tmp_path / "runs/fold1").exists()


def test_folds_that_are_killed_and_started_again_end_as_undisturbed(tmp_path: Path, run_python: RunPython) -> None:
    """Each training made once, the same weights, and the same mean of the scores."""

    def start(folder: Path, ends: str) -> tuple[int, list[str]]:
        folder.mkdir(exist_ok=True)
        (folder / "folds.py").write_text(FOLDS)
        done = run_python(folder, "folds.py", ENDS=ends)
        assert done.returncode in {0, -9}, done.stderr
        return done.returncode, done.stdout.splitlines()

    status, whole = start(tmp_path / "whole", "")
    assert status == 0
    names = ["fold0", "fold1"]
    for nth, name in enumerate(names):
        status, said = start(tmp_path / "killed", f"{name} SIGKILL")
        assert (status, said) == (-9, [f"{one} 10" for one in names[:nth]])
    assert start(tmp_path / "killed", "") == (0, whole)
    assert sorted(os.listdir(tmp_path / "killed/runs")) == sorted(names)
