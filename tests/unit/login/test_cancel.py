"""`hpcddp cancel`: what waits first, what runs gently, and what a scheduler's own commands are given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import BY_HAND, release_run
from hpcddp.supervisor.follow import POLL_S, RepeatedQuestion, stop_on_request

from .runs import held, submitted

CAPTURES = Path(__file__).parents[2] / "captures"
Program = Callable[[str, str], None]
NOTE = 'echo "$(basename $0) $*" >> ../called'


def called(here: Path) -> list[str]:
    path = here.parent / "called"
    return path.read_text().splitlines() if path.exists() else []


def on_slurm(program: Program, *lines: str) -> None:
    program("squeue", "cat <<'END'\n" + "\n".join(lines) + "\nEND")
    program("scancel", NOTE)


def test_what_follows_in_a_chain_goes_first_and_what_runs_is_asked_to_save(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    first = held(RunFolder("runs/a"), "12")
    Path(first.next).write_text("13\n")
    on_slurm(program, "12|12|N/A|RUNNING|N/A|N/A|None|a", "13|13|N/A|PENDING|N/A|N/A|Dependency|a")
    assert main(["cancel", "a"]) == 0
    assert called(here) == ["scancel 13", "scancel --batch --signal=TERM 12"]
    said = capsys.readouterr().err
    assert "13 will not start" in said
    assert "12 was asked to save and stop; hpcddp cancel a --now ends it as scancel does" in said


def test_now_is_the_schedulers_own_command_and_is_not_said_to_have_killed(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    held(RunFolder("runs/a"), "12")
    on_slurm(program, "12|12|N/A|RUNNING|N/A|N/A|None|a")
    assert main(["cancel", "12", "--now"]) == 0
    assert called(here) == ["scancel 12"]
    assert "12 was cancelled by scancel, which leaves it the scheduler's own grace" in capsys.readouterr().err


def test_of_an_array_those_that_wait_go_and_those_that_run_are_asked(here: Path, program: Program) -> None:
    submitted(RunFolder("runs/s"), "12", array="1-9")
    Path("runs/s/sweep.json").write_text('{"schema": 1, "axes": {}, "array": "1-9"}')
    on_slurm(program, "12|14|2|RUNNING|N/A|N/A|None|s", "12|12|3-9%1|PENDING|N/A|N/A|x|s")
    assert main(["cancel", "s"]) == 0
    assert called(here) == ["scancel 12_[3-9]", "scancel --batch --signal=TERM 12_2"]


def until(is_so: Callable[[], object]) -> None:
    """The folder is looked at beside the supervisor."""
    while not is_so():
        time.sleep(0.01)


def test_on_pbs_the_supervisor_is_asked_through_the_runs_folder(here: Path, program: Program) -> None:
    run = RunFolder("runs/a")
    submitted(run, "47.pbs1", scheduler="pbs")
    held(run, "47.pbs1")
    program(
        "qstat",
        'cat <<\'END\'\n{\n\t"Jobs":\t{\n\t\t"47.pbs1":\t{\n\t\t\t"job_state":\t"R"\n\t\t}\n\t}\n}\nEND',
    )
    program("qdel", NOTE)
    path = Path("runs/a/holders/000001/holder.json")
    path.write_text(path.read_text().replace('"slurm"', '"pbs"'))
    assert main(["cancel", "a"]) == 0
    assert called(here) == []
    asked = Path(run.stop_request("47.pbs1"))
    assert asked.exists()
    got: list[int] = []
    import signal

    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    try:
        now = [100.0]
        request = RepeatedQuestion(lambda: stop_on_request(str(asked)), POLL_S, lambda: now[0])
        request.poll()
        until(lambda: got)
        assert (got, asked.exists()) == ([signal.SIGTERM], False)
        asked.touch()
        request.poll()  # it has just looked
        assert len(got) == 1
        now[0] += POLL_S
        until(lambda: request.poll() or len(got) == 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_of_an_array_on_pbs_each_job_is_named_and_never_the_array(here: Path, program: Program) -> None:
    run = RunFolder("runs/s")
    submitted(run, "48[].pbs1", array="1-3", scheduler="pbs")
    Path(run.sweep).write_text('{"schema": 1, "axes": {}, "array": "1-3"}')
    point = RunFolder("runs/s.1")
    held(point, "48[1].pbs1", attempt="48-1.pbs1.1")
    path = Path("runs/s.1/holders/000001/holder.json")
    path.write_text(path.read_text().replace('"slurm"', '"pbs"'))
    each = {"48[].pbs1": "B", "48[1].pbs1": "R", "48[2].pbs1": "Q", "48[3].pbs1": "Q"}
    program("qstat", f"echo '{json.dumps({'Jobs': {job: {'job_state': state} for job, state in each.items()}})}'")
    program("qdel", NOTE)
    assert main(["cancel", "s"]) == 0
    assert called(here) == ["qdel 48[2].pbs1 48[3].pbs1"]
    assert Path(point.stop_request("48-1.pbs1")).exists()


def test_a_job_that_ended_meanwhile_is_no_error_and_a_refusal_is(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    held(RunFolder("runs/a"), "12")
    on_slurm(program, "12|12|N/A|RUNNING|N/A|N/A|None|a")
    program("scancel", "echo 'scancel: error: Invalid job id 12' >&2; exit 1")
    assert main(["cancel", "a", "--now"]) == 0
    program("scancel", "echo 'scancel: error: Kill job error on job id 12: Access/permission denied' >&2; exit 1")
    assert main(["cancel", "a", "--now"]) == 5
    assert "Access/permission denied" in capsys.readouterr().err


def test_where_the_scheduler_does_not_answer_nothing_is_said_to_be_cancelled(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    held(RunFolder("runs/a"), "12")
    program("squeue", "echo 'squeue: error: no controller' >&2; exit 1")
    assert main(["cancel", "a"]) == 5
    assert "nothing of Slurm's was cancelled" in capsys.readouterr().err


def test_what_was_launched_by_hand_ends_without_the_allocation_around_it(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder("runs/a")
    held(run, "12", by_hand=True)
    on_slurm(program, "12|12|N/A|RUNNING|N/A|N/A|None|interactive")
    for words in ([], ["--now"]):
        assert main(["cancel", "a", *words]) == 0
        assert called(here) == []
        assert Path(run.stop_request(f"12{BY_HAND}7")).exists()
    assert "to end all of job 12, in which it was launched by hand: scancel 12" in capsys.readouterr().err
    release_run(run, f"12{BY_HAND}7.1", 1)
    on_slurm(program, "12|12|N/A|PENDING|N/A|N/A|BeginTime|interactive")  # the allocation is to start again
    assert main(["cancel", "a"]) == 0
    assert called(here) == []
    assert "a cannot be asked to stop: it is queued; to end all of job 12" in capsys.readouterr().err


def test_of_an_array_the_last_job_alone_is_asked_although_it_has_the_arrays_id(here: Path, program: Program) -> None:
    submitted(RunFolder("runs/s"), "26", array="1-3")
    Path("runs/s/sweep.json").write_text('{"schema": 1, "axes": {}, "array": "1-3"}')
    held(RunFolder("runs/s.3"), "26", attempt="26-3.1")
    on_slurm(program, "26|27|1|RUNNING|N/A|N/A|None|", "26|28|2|RUNNING|N/A|N/A|None|", "26|26|3|RUNNING|N/A|N/A|None|")
    assert main(["cancel", "s.3"]) == 0
    assert called(here) == ["scancel --batch --signal=TERM 26_3"]


def test_one_job_of_an_array_can_be_taken_back_before_it_begins(here: Path, program: Program) -> None:
    submitted(RunFolder("runs/s"), "12", array="1-9")
    Path("runs/s/sweep.json").write_text('{"schema": 1, "axes": {}, "array": "1-9"}')
    on_slurm(program, "12|14|2|RUNNING|N/A|N/A|None|", "12|12|3-9%1|PENDING|N/A|N/A|x|")
    assert main(["cancel", "s.5"]) == 0
    assert called(here) == ["scancel 12_5"]
    assert main(["status", "s.12"]) == 2


def test_a_command_that_fails_without_a_word_has_signalled_and_one_that_fails_takes_no_other_away(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, run in (("12", "a"), ("13", "b")):
        held(RunFolder(f"runs/{run}"), job)
    on_slurm(program, "12|12|N/A|RUNNING|N/A|N/A|None|", "13|13|N/A|RUNNING|N/A|N/A|None|")
    program("scancel", f"{NOTE}; exit 229")
    assert main(["cancel", "a"]) == 0
    program("scancel", f"{NOTE}; [ $3 = 13 ] || {{ echo 'scancel: error: no' >&2; exit 1; }}")
    assert main(["cancel", "a", "b"]) == 5
    said = capsys.readouterr().err
    assert "13 was asked to save and stop" in said
    assert "scancel: scancel: error: no" in said
    assert called(here)[-2:] == ["scancel --batch --signal=TERM 12", "scancel --batch --signal=TERM 13"]
