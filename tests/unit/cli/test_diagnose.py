"""`hpcddp diagnose`: a run, logs of anybody, or a job that only its scheduler knows; and the line in `status`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.state import write_state
from hpcddp.schedulers import slurm
from hpcddp.schedulers.row import CommandAnswer
from tests.unit.login.runs import held, submitted

FULL = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/u/t.py", line 3, in <module>\n[rank1]: OSError: '
FULL += "[Errno 28] No space left on device\n"
RESET = FULL.replace("rank1", "rank0").replace(
    "OSError: [Errno 28] No space left on device", "Connection closed by peer"
)


def scheduler(folder: Path, monkeypatch, **programs: str) -> None:
    """A scheduler's commands that print these texts; all others are missing."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/bin")


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """A run of job 7, which has ended with status 1, with a log of each rank."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder("runs/train")
    attempt = held(run, "7", status=1)
    Path(attempt.log).parent.mkdir()
    Path(attempt.log).write_text(
        f"hpcddp: 2 ranks on 2 nodes, by srun\n{RESET}hpcddp: the launcher ended with status 1\n"
    )
    Path(attempt.rank_log(1, "node2")).write_text(f"[rank 1] INFO step 3\n{FULL}")
    return run


@pytest.mark.parametrize("word", ["train", "runs/train", "7"])
def test_a_run_is_diagnosed_by_its_name_folder_and_job(word, run, tmp_path, monkeypatch, capsys):
    scheduler(
        tmp_path, monkeypatch, squeue="7|7|N/A|FAILED|2026-01-01T12:00:00|2026-01-01T12:10:00|NonZeroExitCode|(null)|\n"
    )
    assert main(["diagnose", word, "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert (cause["class"], cause["rank"], cause["host"], cause["line"]) == ("disk-full", 1, "node2", 4)
    assert cause["file"].endswith("rank-0001.node2.log")


def test_what_a_report_quotes_of_a_rank_with_a_log_counts_once(run, tmp_path, monkeypatch, capsys):
    logs = Path("runs/train/attempts/7.1/logs")
    report = "hpcddp: rank 1 on node2 was killed by SIGSEGV. The end of its output:\n    [rank 1] INFO step 3\n"
    (logs / "rank-0001.node2.log").write_text("[rank 1] INFO step 3\n")
    (logs / "job.log").write_text(f"{RESET}{report}")
    scheduler(tmp_path, monkeypatch, squeue="")
    assert main(["diagnose", "train", "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert (cause["class"], cause["rank"], cause["line"]) == ("crash", 1, 4)


def test_the_schedulers_record_says_why_where_the_logs_do_not(run, tmp_path, monkeypatch, capsys):
    for log in Path("runs/train/attempts/7.1/logs").iterdir():
        log.write_text("[rank 1] INFO step 3\n")
    scheduler(
        tmp_path, monkeypatch, squeue="7|7|N/A|TIMEOUT|2026-01-01T12:00:00|2026-01-01T12:10:00|TimeLimit|(null)|\n"
    )
    assert main(["diagnose", "train"]) == 0
    assert capsys.readouterr().out.startswith("runs/train: walltime: ")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[rank 1] INFO step 3", ("killed", None)),
        ("srun: error: node2: task 1: Killed", ("host-memory", 1)),
        ("hpcddp: the script ends here: the run stopped (SIGTERM)", ("killed", 2)),
    ],
)
def test_a_run_that_a_signal_stopped_says_so_where_its_logs_say_no_more(
    line, cause, run, tmp_path, monkeypatch, capsys
):
    logs = Path("runs/train/attempts/7.1/logs")
    (logs / "rank-0001.node2.log").write_text("[rank 1] INFO step 3\n")
    (logs / "job.log").write_text(f"[rank 0] INFO step 3\n{line}\n")
    write_state(run.attempt("7.1"), "unfinished", step=3, epoch=0, reason="SIGTERM")
    scheduler(tmp_path, monkeypatch, squeue="")
    assert main(["diagnose", "train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cause"]
    assert (found["class"], found["rank"] if found["rank"] is not None else found["line"]) == cause


def test_of_the_jobs_own_output_the_schedulers_words_count_and_nothing_twice(run, tmp_path, monkeypatch, capsys):
    output = tmp_path / "slurm-7.out"
    output.write_text(
        f"{FULL}{FULL}slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-01-01T12:10:00 DUE TO TIME LIMIT ***\n"
    )
    one = submitted(run, "7")
    about = next(Path(run.submitted).rglob("*.json"))
    about.write_text(json.dumps({**json.loads(about.read_text()), "output": str(output)}))
    scheduler(tmp_path, monkeypatch, squeue="")
    assert main(["diagnose", "train", "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert (one.job, cause["class"], cause["rank"]) == ("7", "disk-full", 1)
    for log in Path("runs/train/attempts/7.1/logs").iterdir():
        log.write_text("[rank 1] INFO step 3\n")
    assert main(["diagnose", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"]["class"] == "walltime"


def test_status_of_a_run_that_failed_shows_its_first_line(run, tmp_path, monkeypatch, capsys):
    scheduler(tmp_path, monkeypatch, squeue="")
    assert main(["status", "train"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "why disk-full on rank 1 (node2): runs/train/attempts/7.1/logs/rank-0001.node2.log:4: [rank1]: OSError" in told
    )


def test_a_run_that_lives_has_no_cause_yet(run, tmp_path, monkeypatch, capsys):
    scheduler(tmp_path, monkeypatch, squeue="9|9|N/A|RUNNING|2026-01-01T12:00:00|N/A|None|(null)|\n")
    held(RunFolder("runs/other"), "9")
    assert main(["diagnose", "other"]) == 2
    assert "runs/other has not ended: it is running" in capsys.readouterr().err


def test_logs_of_anybody_are_read_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.out").write_text(RESET)
    (tmp_path / "logs" / "rank-1.out").write_text(FULL)
    (tmp_path / "logs" / "job.sh").write_text(FULL.replace("rank1", "rank7"))
    for words in (["logs"], ["logs/rank-1.out", "logs/rank-0.out"]):
        assert main(["diagnose", *words]) == 0
        assert "disk-full on rank 1: no space, or a limit on file sizes" in capsys.readouterr().out
    assert main(["diagnose", "logs", "train"]) == 2
    assert "there is no log train" in capsys.readouterr().err


def test_a_job_without_a_run_is_diagnosed_by_its_scheduler_also_when_that_has_to_look_it_up(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    scheduler(
        tmp_path, monkeypatch, squeue="", sacct="41|OUT_OF_MEMORY|0:125|2026-01-01T12:00:00|2026-01-01T12:10:00|node3\n"
    )
    assert main(["diagnose", "41", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"]["class"] == "host-memory"
    assert main(["diagnose", "nobody"]) == 2


def test_a_job_that_nobody_knows_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scheduler(tmp_path, monkeypatch)
    assert main(["diagnose", "41"]) == 2
    assert capsys.readouterr().err.startswith("hpcddp: no scheduler here knows job 41")


@pytest.mark.parametrize(
    ("line", "state", "reason", "status"),
    [
        ("41|TIMEOUT|0:0|2026-01-01T12:00:00|2026-01-01T12:10:00|node[1-2]", "failed", "TIMEOUT on node[1-2]", 0),
        ("41|CANCELLED by 1000|0:15|2026-01-01T12:00:00|Unknown|node1", "cancelled", "CANCELLED by 1000 on node1", 143),
        ("41_3|FAILED|7:0|2026-01-01T12:00:00|2026-01-01T12:10:00|node1", "failed", "", 7),
        ("41|COMPLETED|0:0|2026-01-01T12:00:00|2026-01-01T12:10:00|node1", "finished", "", 0),
    ],
)
def test_sacct_says_how_a_job_ended(line, state, reason, status):
    (job,) = slurm.parse_ended(CommandAnswer(0, f"{line}\n", ""), slurm.SCHEDULER.states).jobs
    assert (job.state, job.reason, job.status) == (state, reason, status)
