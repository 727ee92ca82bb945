"""What became of runs: by their folders, by the scheduler, by both, and by neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.login.find_run import find_run, find_runs
from hpcddp.login.judge import RunStatus, find_status
from hpcddp.login.status_text import format_statuses
from hpcddp.login.watched import Watcher
from hpcddp.processes import find_machine
from hpcddp.runs.chain import record_opened
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import describe_process, release_run, take_run
from hpcddp.runs.state import write_state
from hpcddp.runs.submitted import record_submission

from .runs import held, metrics, submitted

Program = Callable[[str, str], None]


def squeue(program: Program, *lines: str) -> None:
    program("squeue", "echo x >> ../asked; cat <<'END'\n" + "\n".join(lines) + "\nEND")


def status(name: str) -> RunStatus:
    import os

    return find_status(find_runs([name]), os.environ).runs[0]


def test_a_job_that_waits_has_its_reason_and_its_estimated_start(here: Path, program: Program) -> None:
    submitted(RunFolder("runs/a"), "12")
    squeue(program, "12|12|N/A|PENDING|2030-01-01T12:00:00|N/A|Resources|a")
    one = status("a")
    assert (one.state, one.job, one.why) == ("queued", "12", "Resources")
    assert one.starts is not None


def test_a_job_that_runs_has_step_loss_speed_and_both_times_left(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(RunFolder("runs/a"), "12")
    metrics(held(RunFolder("runs/a"), "12"), 10, total=40)
    squeue(program, "12|12|N/A|RUNNING|2026-01-01T12:00:00|2099-01-01T12:00:00|None|a")
    one = status("a")
    assert (one.state, one.step, one.total_steps, one.loss) == ("running", 10, 40, 0.1)
    assert (one.samples_per_s, one.left_s) == (50.0, 60.0)
    assert one.ends is not None
    assert main(["status", "a"]) == 0
    out = capsys.readouterr().out
    assert "runs/a: running\n" in out
    assert "step      10 of 40, epoch 0\n" in out
    assert "left      00:01:00\n" in out


def test_a_job_that_left_a_run_of_its_script_unfinished_is_not_finished(here: Path, program: Program) -> None:
    attempt, fold = held(RunFolder("runs/a"), "12", status=85), RunFolder("runs/fold")
    record_opened(attempt, fold)
    write_state(fold.attempt(attempt.name), "unfinished", step=7, epoch=1, reason="deadline")
    for _ in range(2):
        assert (status("a").state, status("a").why) == ("unfinished", "run runs/fold: step 7 (deadline)")
        assert Watcher(RunFolder("runs/a"), {}).poll().status.state == "unfinished"
        write_state(attempt, "finished", step=9, epoch=1, reason="done")  # as of a script that tunes it then
    write_state(fold.attempt(attempt.name), "finished", step=9, epoch=1, reason="done")
    assert status("a").state == "finished"


TEN_MINUTES = "2026-01-01T12:00:00|2026-01-01T12:10:00|None|a"
NEVER = "N/A|N/A|Dependency|a"
KILLED = "it was killed: it left no exit status, and no state"
GONE = "its scheduler does not know it any more, and it has not started"


@pytest.mark.parametrize(
    ("ended", "shown", "state", "why"),
    [
        ("stopped", [], "unfinished", "deadline"),
        ("143", [f"12|12|N/A|TIMEOUT|{TEN_MINUTES}"], "unfinished", "SIGTERM; TIMEOUT"),
        ("143", [f"12|12|N/A|CANCELLED|{TEN_MINUTES}", f"13|13|N/A|CANCELLED|{NEVER}"], "cancelled", "SIGTERM"),
        ("143", [f"13|13|N/A|CANCELLED|{NEVER}"], "cancelled", "SIGTERM"),  # of the next link, which never began
        ("killed", [f"12|12|N/A|NODE_FAIL|{TEN_MINUTES}"], "failed", "NODE_FAIL"),
        ("killed", [], "failed", KILLED),
        ("never", [f"12|12|N/A|CANCELLED|{NEVER}"], "cancelled", "Dependency"),
        ("never", [], "cancelled", GONE),
    ],
)
def test_a_job_that_is_over_has_ended_as_its_ranks_its_supervisor_and_its_scheduler_say(
    here: Path, program: Program, ended: str, shown: list[str], state: str, why: str
) -> None:
    run = RunFolder("runs/a")
    squeue(program, *shown)
    if ended == "never":
        submitted(run, "12")
    elif ended == "stopped":
        attempt = held(run, "12", status=85)
        write_state(attempt, "unfinished", step=7, epoch=1, reason="deadline", weights_sha256="ab")
    else:
        attempt = held(run, "12", status=143 if ended == "143" else None)
        Path(attempt.next).write_text("13\n" if ended == "143" else "")
    one = status("a")
    assert (one.state, one.why) == (state, why)
    assert (one.step, one.weights_sha256) == ((7, "ab") if ended == "stopped" else (None, None))


def test_what_was_launched_here_and_is_gone_without_a_word_was_killed(here: Path) -> None:
    run = RunFolder("runs/a")
    gone = describe_process("local-1.1", 2**22 + 1, {}, ())._replace(started="9")  # above the kernel's highest number
    take_run(run, gone, lambda _scheduler, _job: None)
    assert (status("a").state, status("a").why) == ("failed", KILLED)


def test_an_array_as_a_whole_is_none_of_its_jobs(here: Path, program: Program) -> None:
    run = RunFolder("runs/s")
    submitted(run, "48[].pbs1", array="1-2", scheduler="pbs")
    Path(run.sweep).write_text('{"schema": 1, "axes": {}, "array": "1-2"}')
    each = {"48[].pbs1": "B", "48[1].pbs1": "R", "48[2].pbs1": "Q"}
    program("qstat", f"echo '{json.dumps({'Jobs': {job: {'job_state': state} for job, state in each.items()}})}'")
    assert status("s").why == "1 running, 1 queued"


def test_of_what_the_ranks_have_finished_nobody_is_asked(here: Path, program: Program) -> None:
    squeue(program, "12|12|N/A|COMPLETING|2026-01-01T12:30:00|2026-01-01T13:00:00|None|(null)|")
    attempt = held(RunFolder("runs/a"), "12", status=0)
    assert status("a").state == "finished"
    assert (here.parent / "asked").read_text() == "x\n"
    write_state(attempt, "finished", step=9, epoch=1, reason="done")
    assert status("a").state == "finished"
    assert (here.parent / "asked").read_text() == "x\n"  # nothing of it can live: nobody is asked


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_that_left_no_word_is_not_finished_because_its_scheduler_says_so(
    here: Path, program: Program, scheduler: str
) -> None:
    """PBS gives a job whose login shell was killed Exit_status 0."""
    squeue(program, "12|12|N/A|COMPLETED|2026-01-01T12:00:00|2026-01-01T12:10:00|None|(null)|")
    program("qstat", """echo '{"Jobs": {"12": {"job_state": "F", "substate": 92, "Exit_status": 0}}}'""")
    attempt = held(RunFolder("runs/a"), "12", scheduler=scheduler)
    one = status("a")
    assert (one.state, one.exit_status) == ("failed", None)
    assert one.why == "it was killed: it left no exit status, and no state"
    write_state(attempt, "finished", step=9, epoch=1, reason="done")
    assert status("a").state == "finished"
    submitted(RunFolder("runs/b"), "12", scheduler=scheduler)
    assert status("b").state == "ended"


@pytest.mark.parametrize(
    ("output", "state", "why"),
    [
        ("", "cancelled", ""),
        ("script.sh: line 9: module: command not found\n", "failed", "it ended before its ranks were started"),
    ],
)
def test_a_job_on_this_machine_that_never_held_its_run_has_failed_where_it_said_anything(
    here: Path, output: str, state: str, why: str
) -> None:
    one = submitted(RunFolder("runs/a"), "local-1", scheduler="local")
    (here / "output").write_text(output)
    gone = one._replace(process=1, started="0", machine=find_machine(), output=str(here / "output"))
    record_submission("runs/a/submitted/000001", gone)
    assert (status("a").state, status("a").why.partition(":")[0]) == (state, why)
    assert status("a").log == (str(here / "output") if output else "")


def test_all_links_of_a_chain_are_one_run_and_the_next_one_waits(here: Path, program: Program) -> None:
    run = RunFolder("runs/a")
    first = held(run, "12", status=0)
    write_state(first, "unfinished", step=7, epoch=1, reason="deadline")
    Path(first.chain).write_text(json.dumps({"schema": 1, "attempt": first.name, "turn": 1, "of": 5, "step": 0}))
    Path(first.next).write_text("13\n")
    squeue(program, "13|13|N/A|PENDING|N/A|N/A|Priority|a")
    one = status("a")
    assert (one.state, one.job, one.links, one.step) == ("queued", "13", (1, 5), 7)
    write_state(first, "finished", step=9, epoch=1, reason="done")
    assert status("a").state == "finished"
    held(run, "14")  # of no chain
    squeue(program, "14|14|N/A|RUNNING|N/A|N/A|None|a")
    assert (status("a").job, status("a").links) == ("14", (0, 0))


def test_an_arrays_indices_that_never_ran_are_counted(here: Path, program: Program) -> None:
    sweep = RunFolder("runs/s")
    submitted(sweep, "12", array="1-6%2")
    Path(sweep.sweep).write_text('{"schema": 1, "axes": {}, "array": "1-6%2"}')
    squeue(program)
    assert (status("s").state, status("s").why) == ("cancelled", "6 cancelled")
    for index in ("1", "2"):
        held(RunFolder(f"runs/s.{index}"), f"{12 + int(index)}", attempt=f"12-{index}.1", status=0)
    assert (status("s").state, status("s").why) == ("cancelled", "4 cancelled, 2 finished")
    program("squeue", "exit 1")
    assert status("s").why == "4 unknown, 2 finished"  # who does not answer has not said that they are gone


def test_a_sweep_has_its_runs_below_it_and_its_best(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = RunFolder("runs/s")
    submitted(sweep, "12", array="1-3")
    Path(sweep.sweep).write_text(json.dumps({"schema": 1, "axes": {"lr": ["1", "2", "3"]}, "array": "1-3"}))
    for index, steps in (("1", 4), ("2", 8)):
        run = RunFolder(f"runs/s.{index}")
        attempt = held(run, f"{12 + int(index)}", attempt=f"12-{index}.1", status=0 if index == "1" else None)
        metrics(attempt, steps)
        Path(run.plan).write_text(json.dumps({"schema": 1, "point": {"lr": index}}))
    squeue(program, "12|14|2|RUNNING|2026-01-01T12:00:00|2099-01-01T12:00:00|None|s", "12|12|3%1|PENDING|N/A|N/A|x|s")
    assert main(["status"]) == 0
    table = capsys.readouterr().out
    assert "lr=1,2,3; 1 running, 1 queued, 1 finished; best s.2: loss 0.125" in table
    rows = {line.split()[0]: line.split()[1] for line in table.splitlines()[1:] if not line.startswith("    ")}
    assert rows == {"s": "running", "s.1": "finished", "s.2": "running"}
    assert (here.parent / "asked").read_text() == "x\n"  # one question for all


def test_a_scheduler_that_does_not_answer_is_said_and_the_folders_part_is_shown(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics(held(RunFolder("runs/a"), "12"), 10)
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == [
        "squeue: slurm_load_jobs error: Unable to contact slurm controller; what the run folders say is shown"
    ]
    assert (told["runs"][0]["state"], told["runs"][0]["step"]) == ("unknown", 10)


def test_a_damaged_folder_is_said_and_takes_no_other_run_away(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    held(RunFolder("runs/a"), "12", status=0)
    held(RunFolder("runs/b"), "13", status=0)
    Path("runs/a/state.json").write_text("{")
    assert main(["status"]) == 0
    out = capsys.readouterr()
    assert "runs/a/state.json cannot be read" in out.err
    assert "b    finished" in out.out


def test_a_run_is_found_by_name_by_folder_and_by_the_id_of_any_of_its_jobs(here: Path) -> None:
    submitted(RunFolder("runs/a"), "47.pbs1", scheduler="pbs")
    held(RunFolder("runs/b"), "48[3].pbs1", attempt="48-3.pbs1.1")
    for word in ("a", "runs/a", "runs/a/", str(here / "runs/a"), "47", "47.pbs1"):
        assert Path(find_run(word).path).resolve() == here / "runs/a", word
    for word in ("b", "48[3].pbs1", "48_3", "48-3"):
        assert Path(find_run(word).path).resolve() == here / "runs/b", word


@pytest.mark.parametrize("word", ["c", "runs/c", "99", "../x", "47.pbs2.x.y", "12x", "12,13", "12-train", "12.1"])
def test_a_word_that_no_run_has_is_refused_with_those_that_are_there(
    here: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    submitted(RunFolder("runs/a"), "12")
    for verb in ("status", "logs", "cancel"):
        assert main([verb, word]) == 2
        said = capsys.readouterr().err
        assert f"there is no run {word!r}" in said
        assert "hint: one of: a" in said


WHY = "rank 3 on node7: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB; checkpoint at step 400"


@pytest.mark.parametrize("width", [60, 120])
def test_a_table_fits_its_terminal_and_breaks_no_word(width: int) -> None:
    runs = [
        RunStatus(
            "train", "runs/train", "running", "54.pbs1", (2, 5), 1200, 64000, 1, 1.25, 12345.0, 3600.0, ends=9000
        ),
        RunStatus("train-lr0.1-seed2", "x", "failed", "local-20261125T201724-28852", (0, 0), 400, why=WHY),
        RunStatus("a", "runs/a", "queued", "4711", why="waits for 4710", starts=4000),
        RunStatus("s", "runs/s", "running", "12", point="lr=0.1,0.01,0.001,0.0001", why="2 running", is_sweep=True),
        RunStatus("s.1", "runs/s.1", "finished", "12_1", step=64, total_steps=64, sweep="runs/s"),
    ]
    for text in (format_statuses(runs, 0, width), *(format_statuses([run], 0, width) for run in runs[:3])):
        assert max(map(len, text.splitlines())) <= width
    table = format_statuses(runs, 0, width)
    said = {word for run in runs for word in (run.name, run.state, *run.point.split(), *run.why.split())}
    assert {word.rstrip(";") for word in said} <= {word.rstrip(";") for word in table.split()}
    assert ("54.pbs1" in table) is (width > 60)
    assert any(line.split()[:2] == ["s.1", "finished"] for line in table.splitlines())


@pytest.mark.parametrize(
    ("exit_status", "log", "cause", "state", "why"),
    [
        (3, "epoch 3\nloss 0.5\n", "", "failed", "exit status 3"),
        (1, "x\n", "rank 3 on n7: ValueError: no", "failed", "rank 3 on n7: ValueError: no"),
        (138, "Traceback (most recent call last):\nKeyError: 1\n", "", "cancelled", "SIGUSR1"),
        (143, "", "", "cancelled", "SIGTERM"),
        (139, "", "rank 1 on n7 was killed by SIGSEGV", "failed", "rank 1 on n7 was killed by SIGSEGV"),
        (0, "", "", "finished", ""),
    ],
)
@pytest.mark.parametrize("before", [None, "unfinished"])
def test_a_failed_run_shows_its_first_cause_and_where_more_of_it_is(
    here: Path, program: Program, exit_status: int, log: str, cause: str, state: str, why: str, before: str | None
) -> None:
    run = RunFolder("runs/a")
    if before:  # of an earlier job: it says nothing of how this one has ended
        first = held(run, "11", status=85)
        write_state(first, before, step=7, epoch=0, reason="SIGTERM")
    attempt = held(run, "12")
    Path(attempt.log).parent.mkdir(parents=True)
    Path(attempt.log).write_text(log)
    release_run(run, attempt.name, exit_status, cause=cause)
    squeue(program)
    one = status("a")
    if before is None:
        assert (one.state, one.why) == (state, why)
        assert one.log == (attempt.log if state == "failed" else "")
    elif state == "failed":
        assert (one.state, one.why, one.log) == (state, f"{why}; checkpoint at step 7", attempt.log)
    else:
        assert one.state == "unfinished"


def test_an_error_soon_after_a_signal_is_said_with_it(here: Path, program: Program) -> None:
    attempt = held(RunFolder("runs/a"), "12")
    release_run(RunFolder("runs/a"), attempt.name, 1, "SIGUSR1", "rank 3 on n7: ValueError: no")
    squeue(program)
    assert (status("a").state, status("a").why) == ("cancelled", "SIGUSR1; rank 3 on n7: ValueError: no")


def test_a_run_that_ends_while_its_scheduler_is_asked_has_ended_as_it_says(here: Path, program: Program) -> None:
    for name, exit_status in (("a", 0), ("b", 3)):
        run = RunFolder(f"runs/{name}")
        attempt = held(run, "12")
        before = {path for path in Path(run.path).rglob("*") if path.is_file()}
        release_run(run, attempt.name, exit_status)
        (end,) = (path for path in Path(run.path).rglob("*") if path.is_file() and path not in before)
        end.rename(here / name)
        program("squeue", f"mv '{here / name}' '{end.absolute()}'")  # nothing is left of the job
        assert (status(name).state, status(name).exit_status) == ("failed" if exit_status else "finished", exit_status)


def test_a_run_that_begins_and_ends_while_its_scheduler_is_asked_has_ended_as_it_says(
    here: Path, program: Program
) -> None:
    run = RunFolder("runs/a")
    submitted(run, "12")
    release_run(run, held(run, "12").name, 0)
    for path in (run.holders, run.attempts):
        Path(path).rename(here / Path(path).name)
    program("squeue", f"cd {here}; mv holders attempts {run.path}")
    one = status("a")
    assert (one.state, one.exit_status) == ("finished", 0)


@pytest.mark.parametrize(("signal", "exit_status"), [("SIGTERM", 0), ("SIGUSR1", 0), ("SIGINT", 1), ("SIGTERM", 143)])
def test_what_a_signal_has_ended_is_not_finished_unless_the_ranks_said_so(
    here: Path, program: Program, signal: str, exit_status: int
) -> None:
    run = RunFolder("runs/a")
    attempt = held(run, "12")
    release_run(run, attempt.name, exit_status, signal)
    squeue(program)
    assert (status("a").state, status("a").why) == ("cancelled", signal)
    write_state(attempt, "failed", step=7, epoch=0, reason="PeerFailedError")
    assert (status("a").state, status("a").why) == ("unfinished", signal)
    write_state(attempt, "finished", step=9, epoch=0, reason="done")
    assert (status("a").state, status("a").why) == ("finished", "done")


def test_each_point_of_a_sweep_that_was_submitted_again_is_counted_once(here: Path, program: Program) -> None:
    sweep = RunFolder("runs/s")
    for job in ("12", "20"):
        submitted(sweep, job, array="1-4%2")
    Path(sweep.sweep).write_text('{"schema": 1, "axes": {}, "array": "1-4%2"}')
    for index in (1, 2, 3):
        attempt = held(RunFolder(f"runs/s.{index}"), f"{12 + index}", attempt=f"12-{index}.1", status=85)
        write_state(attempt, "unfinished", step=7, epoch=0, reason="deadline")
    held(RunFolder("runs/s.1"), "21", attempt="20-1.1")
    squeue(
        program,
        "20|21|1|RUNNING|2026-01-01T12:00:00|2099-01-01T12:00:00|None||",
        "20|22|2|RUNNING|2026-01-01T12:00:00|2099-01-01T12:00:00|None||",
        "20|20|3-4%2|PENDING|N/A|N/A|JobArrayTaskLimit||",
    )
    assert (status("s").why, status("s").size) == ("2 running, 2 queued", 4)
    assert [(status(f"s.{i}").state, status(f"s.{i}").job) for i in (1, 2, 3, 4)] == [
        ("running", "20_1"),
        ("running", "20_2"),
        ("queued", "20_3"),
        ("queued", "20_4"),
    ]
