"""`hpcddp logs`: which lines, in which order, from which files; and lines that are still to come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcddp
from hpcddp.cli.main import main
from hpcddp.cli.streams import shown_bytes
from hpcddp.errors import RequestError
from hpcddp.processes import find_machine
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import Holder, release_run, take_run
from hpcddp.runs.logs import LogFile, LogReader, find_time, read_log_lines
from hpcddp.runs.state import write_state

from .runs import held, submitted


def write(job: str, attempt: str, files: dict[str, str], *, status: int | None = 0) -> None:
    of = held(RunFolder("runs/a"), job, status=status, attempt=attempt)
    folder = Path(of.log).parent
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def logs(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["logs", "a", *words]) == 0
    return capsys.readouterr().out


def test_the_newest_attempt_is_shown_and_others_by_name_number_or_all(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("9", "9.1", {"job.log": "first\n"})
    write("10", "10.1", {"job.log": "second\nlast\n"})  # by name it would stand before 9.1
    os.utime("runs/a/attempts/10.1", (1, 1))  # as in a copy of the run, and by time as well
    assert logs(capsys) == "second\nlast\n"
    assert logs(capsys, "-n", "1") == "last\n"
    assert logs(capsys, "--attempt", "1") == logs(capsys, "--attempt", "9.1") == "first\n"
    assert logs(capsys, "--attempt", "all") == "first\nsecond\nlast\n"
    assert main(["logs", "a", "--attempt", "7"]) == 2
    assert "run runs/a has no attempt 7" in capsys.readouterr().err


def test_ranks_are_merged_by_the_times_that_their_lines_begin_with(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        "9",
        "9.1",
        {
            "job.log": "2026-11-24 00:00:01 job\n  more of it\n2026-11-24 00:00:04 end\n",
            "rank-0001.n1.log": "[2026-11-24T00:00:02,500] one\n",
            "rank-0002.n2.log": "2026-11-24 00:00:03.25 two\n",
        },
    )
    assert logs(capsys, "--rank", "all").splitlines() == [
        "job | 2026-11-24 00:00:01 job",
        "job |   more of it",
        "n1 rank 1 | [2026-11-24T00:00:02,500] one",
        "n2 rank 2 | 2026-11-24 00:00:03.25 two",
        "job | 2026-11-24 00:00:04 end",
    ]
    assert logs(capsys, "--rank", "2") == "2026-11-24 00:00:03.25 two\n"
    assert logs(capsys, "--rank", "0") == logs(capsys)


def test_a_terminal_gets_of_a_progress_bar_what_it_showed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"\r 10%\r 50%\x1b[K\r\x1b[32m100%\r"
    assert shown_bytes(line) == line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown_bytes(line) == b"[32m100%"
    assert shown_bytes(b"plain") == b"plain"


def test_files_without_times_follow_one_another(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("9", "9.1", {"job.log": "a\nb\n", "rank-0001.n1.log": "c\n"})
    assert main(["logs", "a", "--rank", "0-1"]) == 0
    assert capsys.readouterr().out == "job | a\njob | b\nn1 rank 1 | c\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "7"], "there is no log of rank 7 in attempt 9.1"),
        (["--rank", "x"], "--rank 'x' names no ranks"),
        (["-n", "x"], "--lines"),
        (["-f", "--attempt", "1"], "--follow goes with the newest attempt"),
    ],
)
def test_what_is_not_there_is_said(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    write("9", "9.1", {"job.log": "a\n"})
    assert main(["logs", "a", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_whose_job_has_not_started(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(RunFolder("runs/a"), "9")
    assert main(["logs", "a"]) == 2
    assert "none of its jobs has started its ranks\nhint: hpcddp status a" in capsys.readouterr().err


def test_it_follows_into_the_next_start_and_the_next_job_and_ends_with_the_run(here: Path) -> None:
    write("9", "9.1", {"job.log": "one\ntw"}, status=None)
    command = [sys.executable, "-m", "hpcddp", "logs", "a", "-f"]
    env = {**os.environ, "PATH": "/nonexistent", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as following:
        assert following.stdout is not None
        try:
            assert following.stdout.readline() == "one\n"  # half a line waits for its end
            with open("runs/a/attempts/9.1/logs/job.log", "a") as file:
                file.write("o\n")
            assert following.stdout.readline() == "two\n"
            run = RunFolder("runs/a")
            write("10", "10.1", {"job.log": "three\n"}, status=None)
            assert following.stdout.readline() == "three\n"
            with open("runs/a/attempts/10.1/logs/job.log", "a") as file:
                file.write("without an end")
            write_state(run.attempt("10.1"), "finished", step=1, epoch=0, reason="done")
            release_run(run, "10.1", 0)
            assert following.stdout.read() == "without an end\n"
            assert following.wait() == 0
        finally:
            following.kill()


LINES = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20)


@given(lines=LINES, last=st.integers(1, 25), tail=st.booleans())
def test_the_end_of_a_file_is_the_end_of_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last: int, tail: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "log"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + (b"half" if tail else b""))
    whole = [*lines, b"half"] if tail else lines
    assert read_log_lines(str(path))[0] == whole
    assert read_log_lines(str(path), last)[0] == whole[-last:]
    ended, offset = read_log_lines(str(path), last, whole=True)
    assert ended == ([*lines, b""][:-1])[-last:] or tail
    reader = LogReader(LogFile(str(path), "a"), offset)
    assert reader.read(ended=True) == ([b"half"] if tail else [])


@pytest.mark.parametrize("line", [b"", b"2026-13-45 00:00:00 x", b"no time", b"\xff\xfe", b"2026-11-24"])
def test_what_is_no_time(line: bytes) -> None:
    assert find_time(line) is None


def test_times_with_a_zone() -> None:
    assert find_time(b"2026-11-24T01:00:00Z x") == find_time(b"[2026-11-24 02:00:00+0100] x") == 1795482000.0


def test_a_job_has_no_log_of_a_rank_that_an_attempt_never_had_also_where_that_was_killed(here: Path) -> None:
    run = RunFolder("runs/a")
    take_run(run, Holder("local-1", os.uname().nodename, find_machine(), os.getpid(), "0"), lambda *_: None)
    folder = Path(run.attempt("local-1").log).parent
    folder.mkdir(parents=True)
    (folder / "job.log").write_text("one\n")
    assert hpcddp.Job(run="a").logs() == "one\n"
    with pytest.raises(RequestError, match="no log of rank 7 in attempt local-1"):
        hpcddp.Job(run="a").logs(7)
