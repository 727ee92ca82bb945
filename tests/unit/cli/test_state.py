"""`hpcddp state`: what it says to people, and to scripts by its status."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import is_held_by
from hpcddp.runs.state import note_checkpoint, read_state, write_state


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run whose attempt 41 stopped in time; this is attempt 41."""
    write_state(RunFolder(str(tmp_path)).attempt("41"), "unfinished", step=210, epoch=3, reason="deadline")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "41")
    return tmp_path


def test_people_and_programs_are_told_the_same(stopped, capsys):
    assert main(["state", str(stopped)]) == 0
    assert capsys.readouterr().out == "unfinished at step 210 (deadline), attempt 41\n  epoch    3\n"
    assert main(["state", "--json", str(stopped)]) == 0
    told = {"status": "unfinished", "step": 210, "epoch": 3, "reason": "deadline", "attempt": "41"}
    assert json.loads(capsys.readouterr().out) == {**told, "weights_sha256": None, "exact": None, "ended": True}


def test_a_script_is_told_by_the_status_whether_its_attempt_is_unfinished(stopped, capsys, monkeypatch):
    assert main(["state", "--unfinished"]) == 0
    assert capsys.readouterr() == ("", "hpcddp: unfinished: step 210 (deadline)\n")
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42")
    assert main(["state", "--unfinished"]) == 1
    for status in ("finished", "failed"):
        write_state(RunFolder(str(stopped)).attempt("42"), status, step=220, epoch=3, reason="")
        assert main(["state", "--unfinished"]) == 1


def test_a_run_without_a_state_is_not_unfinished(stopped, capsys):
    (stopped / "state.json").unlink()
    assert main(["state", "--unfinished"]) == 1
    assert main(["state"]) == 2
    assert "has no state.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", '{"status": "unfinished"', "\0", '{"status": "unfinished", "step": "x"}']
)
@pytest.mark.parametrize("options", [[], ["--json"], ["--unfinished"], ["--end"], ["--chain", "5"]])
def test_a_damaged_state_is_told_in_two_lines_and_stays_as_it_is(stopped, content, options, capsys):
    path = stopped / "state.json"
    path.write_text(content)
    assert main(["state", *options]) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert (said.out, first.startswith(f"hpcddp: {path} ")) == ("", True)
    assert second.startswith(f"hint: look at it: head {path}; then restore it, or remove it")
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "unset", "status"),
    [
        (["state"], "HPCDDP_RUN_DIR", 2),
        (["state", "--chain", "3"], "HPCDDP_ATTEMPT", 4),
        (["state", "--chain", "x"], "-", 2),
        (["state", "--chain", "3", "--unfinished"], "-", 2),
        (["state", "--chain", "3", "--end"], "-", 2),
        (["state", "--begin", "--end"], "-", 2),
        (["state", "--fresh"], "-", 2),
        (["state", "--", "python"], "-", 2),
        (["state", "--begin", "--fresh", "--resume", "x"], "-", 2),
        (["state", "--begin", "--process", "x"], "-", 2),
        (["state", "--begin"], "HPCDDP_ATTEMPT", 4),
        (["state", "--end"], "HPCDDP_ATTEMPT", 4),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(stopped, arguments, unset, status, monkeypatch):
    monkeypatch.delenv(unset, raising=False)
    assert main(arguments) == status


def begin(base, attempt, monkeypatch, *options, command=("python", "train.py"), process=None):
    monkeypatch.setenv("HPCDDP_ATTEMPT", attempt)
    return main(["state", str(base), "--begin", "--process", str(process or os.getppid()), *options, "--", *command])


def test_an_attempt_gets_its_runs_folder_on_stdout_and_which_run_it_is_on_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "runs/train"
    assert begin(base, "41", monkeypatch) == 0
    assert capsys.readouterr() == (f"{base}\n", "hpcddp: run runs/train: new\n")
    assert main(["state", str(base), "--end"]) == 1
    assert begin(base, "42", monkeypatch, command=("python", "other.py")) == 0
    told = "since train was started with another command, python train.py (to resume that one: --resume train)"
    assert capsys.readouterr() == (f"{base}-2\n", f"hpcddp: run runs/train-2: new, {told}\n")


def test_a_second_attempt_is_refused_while_the_first_one_lives(tmp_path, capsys, monkeypatch):
    base = tmp_path / "train"
    assert begin(base, "41", monkeypatch) == 0
    capsys.readouterr()
    assert begin(base, "42", monkeypatch, process=1) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert "is in use by attempt 41 on" in said.err
    assert begin(base, "43", monkeypatch, "--fresh") == 0
    assert capsys.readouterr().out == f"{base}-2\n"


def test_a_script_that_was_ended_while_its_attempt_began_takes_no_run(tmp_path, capsys, monkeypatch):
    base, gone = tmp_path / "train", 2**22 + 1  # above the kernel's highest number
    assert begin(base, "41", monkeypatch, process=gone) == 4
    told = f"the job script of attempt 41 (process {gone}) was ended before its run began; nothing was lost"
    assert capsys.readouterr() == ("", f"hpcddp: {told}\nhint: start or submit the script again\n")
    assert not base.exists()
    assert begin(base, "42", monkeypatch, "--container", process=gone) == 0  # which may hide a script that lives
    assert capsys.readouterr().out == f"{base}\n"
    assert begin(base, "43", monkeypatch) == 4
    assert "cannot be found out on this host" in capsys.readouterr().err


def test_of_an_attempt_that_was_killed_the_checkpoint_that_is_resumed_is_told(tmp_path, capsys, monkeypatch):
    base, run = tmp_path / "train", RunFolder(str(tmp_path / "train"))
    assert begin(base, "41", monkeypatch) == 0
    note_checkpoint(run.attempt("41"), step=30, epoch=3)
    (base / "checkpoints/step-00000032").mkdir(parents=True)
    (base / "checkpoints/step-00000032/manifest.json").write_text('{"epoch": 4}')
    capsys.readouterr()
    assert main(["state", str(base)]) == 0
    assert capsys.readouterr().out.startswith(
        "unfinished at step 30 (checkpoint at step 30; the attempt has not ended)"
    )
    assert main(["state", str(base), "--end"]) == 0
    told = "checkpoint at step 32; the attempt has ended since"
    assert capsys.readouterr().err == f"hpcddp: unfinished: step 32 ({told})\n"
    assert main(["state", str(base)]) == 0
    assert capsys.readouterr().out == f"unfinished at step 32 ({told}), attempt 41\n  epoch    4\n"


def test_the_signal_that_came_to_the_script_is_the_reason_and_one_that_nobody_caught_is_told(
    tmp_path, capsys, monkeypatch
):
    base, run = tmp_path / "train", RunFolder(str(tmp_path / "train"))
    assert begin(base, "41", monkeypatch) == 0
    capsys.readouterr()
    assert main(["state", str(base), "--end", "--signal", "SIGTERM"]) == 1
    told = "SIGTERM came before the ranks had opened hpcddp.runtime(), which catches it: no step was made, and"
    assert capsys.readouterr().err.startswith(f"hpcddp: {told}")
    write_state(run.attempt("41"), "unfinished", step=30, epoch=3, reason="SIGUSR1")
    assert main(["state", str(base), "--end", "--signal", "SIGTERM"]) == 0
    assert capsys.readouterr().err == "hpcddp: unfinished: step 30 (SIGTERM)\n"
    assert read_state(run).reason == "SIGTERM"
    write_state(run.attempt("41"), "unfinished", step=30, epoch=3, reason="deadline")
    run_metrics = Path(run.attempt("41").metrics)
    run_metrics.parent.mkdir(parents=True)
    run_metrics.touch()
    assert main(["state", str(base), "--end", "--signal", "SIGTERM"]) == 0
    assert capsys.readouterr().err == "hpcddp: unfinished: step 30 (deadline)\n"


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """hpcddp 0.1's run of two attempts, and this is the job that the second one queued."""
    shutil.copytree(Path(__file__).parents[2] / "captures/runs-0.1/chain", tmp_path / "chain")
    monkeypatch.setenv("PBS_JOBID", "43.pbs1")
    return RunFolder(str(tmp_path / "chain"))


def begin_chain(run, monkeypatch):
    return begin(run.path, "43.pbs1", monkeypatch, "--chain", "5")


@pytest.mark.parametrize("length", [60, 0])
def test_a_chain_stops_at_a_damaged_state_and_goes_on_once_it_is_restored(chain, length, capsys, monkeypatch):
    path = Path(chain.state)
    whole = path.read_text()
    path.write_text(whole[:length])
    assert begin_chain(chain, monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"hpcddp: {path} cannot be read: " in said.err
    assert path.read_text() == whole[:length]
    assert not os.path.exists(chain.attempt("43.pbs1").path)
    assert not is_held_by(chain, "43.pbs1")
    path.write_text(whole)
    assert begin_chain(chain, monkeypatch) == 0
    assert "attempt 3 of at most 5, from step 4" in capsys.readouterr().err


def test_a_damaged_state_is_not_resumed_by_guess_but_by_name(chain, capsys, monkeypatch):
    monkeypatch.delenv("PBS_JOBID")
    command = json.loads(Path(chain.plan).read_text())["command"]
    Path(chain.state).write_text("")
    assert begin(chain.path, "44", monkeypatch, command=command) == 2  # it may be finished
    assert f"hpcddp: {chain.state} cannot be read: " in capsys.readouterr().err
    assert begin(chain.path, "45", monkeypatch, "--resume", "chain", command=command) == 0


@pytest.mark.parametrize("is_loop", [False, True])
def test_a_chain_whose_next_cannot_be_read_is_told_in_two_lines(chain, is_loop, capsys, monkeypatch):
    path = Path(chain.attempt("42.pbs1").next)
    path.unlink()
    if is_loop:
        path.symlink_to(path)
    else:
        path.mkdir()
    assert begin_chain(chain, monkeypatch) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hpcddp: {path} cannot be read: ")
    assert second == f"hint: ls -l {path}"


def test_a_plan_of_a_newer_hpcddp_is_refused_before_the_script_replaces_it(chain, capsys, monkeypatch):
    path = Path(chain.plan)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 77}))
    assert begin_chain(chain, monkeypatch) == 2
    said = capsys.readouterr()
    assert (said.out, f"{path} was written by a newer hpcddp" in said.err) == ("", True)
    assert not os.path.exists(chain.holders)


def test_a_chain_that_ends_holds_its_run_no_longer(tmp_path, capsys, monkeypatch):
    base = tmp_path / "train"
    assert begin(base, "41", monkeypatch, "--chain", "3") == 0
    assert capsys.readouterr().out == f"{base}\n2\n"
    first = RunFolder(str(base)).attempt("41")
    write_state(first, "finished", step=9, epoch=1, reason="done")
    Path(first.next).write_text("42")
    assert main(["state", str(base), "--end"]) == 1
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert begin(base, "42", monkeypatch, "--chain", "3") == 0
    said = capsys.readouterr()
    assert (said.out, "the chain ends here" in said.err) == ("", True)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert begin(base, "43", monkeypatch, "--resume", "train") == 0
