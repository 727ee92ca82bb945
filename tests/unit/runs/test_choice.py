"""Which run an attempt gets: the same command resumes an unfinished run, and nothing falls into another's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.runs.choice import Asked, Origin, RunChoice, choose_run, find_command, foresee_run, start_run
from hpcddp.runs.lock import find_job_start, note_loaded, release_run
from hpcddp.runs.state import write_state
from hpcddp.schedulers.registry import find_current_job

Train = Callable[..., RunChoice]
COMMAND = ("python", "train.py")
OTHER = ("python", "train.py", "--lr", "1")


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Starts an attempt and ends it with this status ("": it writes no state); returns the choice."""
    number = itertools.count()

    def start(
        status: str = "",
        *,
        command: tuple[str, ...] = COMMAND,
        job: str = "",
        restarts: str = "",
        loads: bool = False,
        **asked: object,
    ) -> RunChoice:
        env = {"SLURM_JOB_ID": job} if job else {}
        env |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        attempt = job or f"local-{next(number)}"
        wanted = Asked(str(tmp_path / "runs" / "train"), command, **asked)  # type: ignore[arg-type]  # as given
        choice = start_run(wanted, attempt, env, process=os.getpid())
        if loads:
            note_loaded(choice.run, attempt)
        release_run(choice.run, attempt)
        if status:
            write_state(choice.run.attempt(attempt), status, step=4, epoch=0, reason="as told")
            os.makedirs(os.path.join(choice.run.checkpoints, "step-00000004"), exist_ok=True)
        return choice

    return start


def named(choice: RunChoice) -> str:
    return os.path.basename(choice.run.path)


def test_the_first_run_of_a_name_is_new(train: Train) -> None:
    choice = train()
    assert (named(choice), choice.is_new) == ("train", True)
    assert str(choice).endswith("runs/train: new")


def test_an_older_run_that_is_not_finished_is_named_beside_a_finished_one(train: Train) -> None:
    train("failed")
    train("finished", fresh=True)
    assert str(train()).endswith("train-3: new, since train-2 is finished (train is not: --resume train)")


@pytest.mark.parametrize("status", ["unfinished", "failed", ""])
def test_the_same_command_resumes_a_run_that_is_not_finished(train: Train, status: str) -> None:
    train(status)
    choice = train()
    assert (named(choice), choice.is_new) == ("train", False)
    resumed = "resumed from step 4" if status else "again; it has no checkpoint yet"
    assert str(choice).endswith(f"runs/train: {resumed} (a new run instead: --fresh)")


def test_after_a_finished_run_the_same_command_begins_one_with_the_next_number(train: Train) -> None:
    assert [named(train("finished")) for _ in range(3)] == ["train", "train-2", "train-3"]
    choice = train("unfinished")
    assert str(choice).endswith("train-4: new, since train-3 is finished (to resume that one: --resume train-3)")
    assert named(train()) == "train-4"


def test_another_command_begins_a_run_of_its_own_and_finds_it_again(train: Train) -> None:
    train("unfinished")
    choice = train("unfinished", command=OTHER)
    assert named(choice) == "train-2"
    assert str(choice).endswith(
        "new, since train was started with another command, python train.py (to resume that one: --resume train)"
    )
    assert [named(train(command=OTHER)), named(train())] == ["train-2", "train"]


def test_resume_names_a_run_whatever_its_command_and_state(train: Train, tmp_path: Path) -> None:
    train("finished")
    choice = train(command=OTHER, resume="train")
    assert (named(choice), str(choice).endswith("resumed from step 4, as --resume asks")) == ("train", True)
    assert named(train(resume=str(tmp_path / "runs" / "train"))) == "train"
    assert named(train(command=OTHER, resume="train")) == "train"


def test_a_run_goes_over_to_the_command_of_a_resume_once_that_has_loaded_its_checkpoint(train: Train) -> None:
    train("unfinished")
    assert named(train(command=OTHER, resume="train")) == "train"  # and ended before it loaded anything
    assert [named(train(command=OTHER)), named(train())] == ["train-2", "train"]
    run = train("unfinished", command=OTHER, resume="train", loads=True).run
    assert find_command(run) == OTHER
    assert named(train()) == "train-3"


def test_fresh_begins_a_new_run_although_one_could_be_resumed(train: Train) -> None:
    train("unfinished")
    choice = train(fresh=True)
    assert str(choice).endswith("train-2: new, as --fresh asks (to resume train: --resume train)")


def test_contradicting_and_wrong_names_are_refused_in_two_lines(train: Train) -> None:
    train()
    with pytest.raises(RequestError, match=r"--fresh begins .* --resume train resumes .*\nhint: keep one"):
        train(fresh=True, resume="train")
    with pytest.raises(RequestError, match=r"--resume tarin: there is no run .*\nhint: one of: train"):
        train(resume="tarin")


def test_the_hint_for_a_run_that_is_not_there_lists_those_beside_it(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        train(resume="nosuch")
    assert error.value.hint == "leave out --resume"
    for name in ("digits", "mnist"):
        (tmp_path / "runs" / name / "attempts").mkdir(parents=True)
    with pytest.raises(RequestError) as error:
        train(resume="nosuch")
    assert error.value.hint == "one of: digits, mnist"


def test_a_job_that_is_started_again_stays_in_its_run(train: Train) -> None:
    train("unfinished")
    assert named(train("finished", job="41", fresh=True)) == "train-2"
    assert named(train(job="41", restarts="1", fresh=True)) == "train-2"
    assert named(train(job="41", restarts="2", fresh=True)) == "train-2"
    assert named(train(job="42", fresh=True)) == "train-3"


def test_scripts_of_one_job_are_no_starts_of_it(train: Train) -> None:
    """A driver job, or a shell of salloc, that runs several rendered scripts."""
    assert named(train("finished", job="41")) == "train"
    assert named(train("finished", job="41", command=OTHER)) == "train-2"
    assert named(train("unfinished", job="41")) == "train-3"
    assert named(train(job="41", fresh=True)) == "train-4"
    assert named(train("finished", job="41", command=OTHER, fresh=True)) == "train-5"
    assert named(train(job="41", command=OTHER, restarts="1")) == "train-2"  # all of them are started again
    assert named(train(job="41", restarts="1")) == "train"
    assert named(train(job="41", restarts="1")) == "train-3"
    assert named(train(job="41", command=OTHER, restarts="1", fresh=True)) == "train-5"


def test_a_variable_job_id_of_ones_own_is_no_job() -> None:
    assert find_current_job({"JOB_ID": "exp1"}) is None
    assert find_current_job({"JOB_ID": "7", "SGE_ROOT": "/opt/sge"}) is None
    assert find_job_start({"JOB_ID": "exp1"}) == ""


def test_a_count_of_restarts_that_was_inherited_hides_no_start() -> None:
    """Slurm hands SLURM_RESTART_COUNT on to a job that is submitted, and sets it from its first restart on."""
    first = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "node3"}
    assert find_job_start(first) != find_job_start(first | {"SLURM_JOB_NODELIST": "node2"})
    assert find_job_start(first) == find_job_start(first | {"SLURM_STEP_ID": "4"})


@pytest.mark.parametrize("again", [False, True], ids=["one start", "started again"])
def test_where_starts_are_not_counted_the_session_of_the_script_tells_them_apart(tmp_path: Path, again: bool) -> None:
    script = f"""
import os
from hpcddp.runs.choice import Asked
from hpcddp.runs.lock import release_run
from hpcddp.runs.choice import start_run
choice = start_run(Asked({str(tmp_path / "train")!r}, ("a",), True), "41", {{"PBS_JOBID": "41"}}, process=os.getpid())
release_run(choice.run, "41")
print(os.path.basename(choice.run.path))
"""
    each = '"$0" -c "$1"'
    sessions = [each, each] if again else [f"{each}; {each}"]
    said = [
        subprocess.run(
            ["sh", "-c", f"{line}; true", sys.executable, script],
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,
        ).stdout
        for line in sessions
    ]
    assert "".join(said) == ("train\ntrain\n" if again else "train\ntrain-2\n")


def test_a_job_of_a_chain_stays_in_the_run_of_the_job_that_queued_it(train: Train) -> None:
    first = train("unfinished", job="41", fresh=True)
    train("unfinished", job="43", command=OTHER)
    attempt = first.run.attempt("41")
    os.makedirs(attempt.path, exist_ok=True)
    Path(attempt.next).write_text("42")
    Path(attempt.chain).write_text(json.dumps({"turn": 1, "of": 3, "step": 0}))
    follow_up = train(job="42", fresh=True)
    assert (named(follow_up), follow_up.before) == ("train", "41")


@pytest.mark.parametrize(
    ("variable", "job"), [("PBS_ARRAY_INDEX", "PBS_JOBID"), ("SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID")]
)
def test_each_index_of_an_array_has_runs_of_its_own(tmp_path: Path, variable: str, job: str) -> None:
    asked = Asked(str(tmp_path / "train"), COMMAND)
    runs = [
        start_run(asked, f"12-{index}", {variable: index, job: f"12[{index}]"}, process=os.getpid()).run.path
        for index in ("1", "2", "12")
    ]
    assert runs == [f"{tmp_path}/train.{index}" for index in ("1", "2", "12")]
    assert start_run(asked, "13", {"SGE_TASK_ID": "undefined"}, process=1).run.path == asked.base


def test_a_folder_that_no_attempt_was_in_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train-x").mkdir()
    (tmp_path / "train-02").mkdir()
    assert choose_run(Asked(str(tmp_path / "train"), COMMAND), Origin()).run.path == str(tmp_path / "train")


def test_what_a_job_would_get_is_foreseen_where_its_runs_are_seen(train: Train, tmp_path: Path) -> None:
    asked = Asked(str(tmp_path / "runs" / "train"), COMMAND)
    assert foresee_run(asked) is None
    train("unfinished")
    assert "if the job started now: run " in str(foresee_run(asked))
    start_run(asked, "41", {}, process=os.getpid())
    assert foresee_run(asked) is not None
    with pytest.raises(HpcddpError, match="there is no run"):
        foresee_run(asked._replace(resume="other"))
