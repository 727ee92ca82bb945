"""What is said of a rank that has failed, from the end of its output."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hpcddp.runs.failure import (
    choose_error,
    choose_lines,
    describe_end,
    format_failure,
    read_log_end,
)

TRACEBACK = """\
step 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
ValueError: bad
"""


def test_the_last_traceback_says_what_happened() -> None:
    assert choose_lines(TRACEBACK) == TRACEBACK.splitlines()[-4:]


def test_what_torch_warns_of_after_a_traceback_is_left_out() -> None:
    remark = "[rank1]:[W1122 03:45:12.1 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called\n"
    assert choose_lines(TRACEBACK + remark + remark[8:])[-1] == "ValueError: bad"


def test_a_long_traceback_is_shortened_in_its_middle() -> None:
    lines = ["Traceback (most recent call last):", *(f"  frame {n}" for n in range(40)), "ValueError: bad"]
    shown = choose_lines("\n".join(lines))
    assert len(shown) == 14
    assert shown[:2] == [lines[0], "  …"]
    assert shown[2:] == lines[-12:]


def test_without_a_traceback_the_last_lines_are_shown_as_a_terminal_would() -> None:
    text = "".join(f"line {n}\n\n" for n in range(9)) + "10%\r20%\r30%\nSegmentation fault"
    assert choose_lines(text) == ["line 5", "line 6", "line 7", "line 8", "30%", "Segmentation fault"]
    assert choose_lines("") == choose_lines("\n \n") == []


def test_a_log_is_read_from_where_this_start_began_and_not_beyond_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\nnew \xff\n")
    assert read_log_end(str(log), 4) == "new \ufffd\n"
    log.write_bytes(b"x" * 100_000 + b"end")
    assert len(read_log_end(str(log), 0)) == 16384
    assert read_log_end(str(tmp_path / "none"), 0) == ""


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3 << 8, "ended with status 3"),
        (signal.SIGSEGV, "was killed by SIGSEGV"),
        (signal.SIGABRT | 0x80, "was killed by SIGABRT"),
        (signal.SIGKILL, "was killed by SIGKILL (often: out of memory)"),
        (signal.SIGRTMIN + 3, "was killed by SIGRTMIN+3"),
    ],
)
def test_a_wait_status_in_words(status: int, text: str) -> None:
    assert describe_end(status) == text


@pytest.mark.parametrize(
    ("output", "log", "report"),
    [
        ("a\nb", "x/log", "rank 3 on n2 ended. The end of its output:\n    a\n    b\n  all of it: x/log"),
        ("", "log", "rank 3 on n2 ended and wrote nothing; its log is log"),
        ("", "", "rank 3 on n2 ended and wrote no error"),
        ("a", "", "rank 3 on n2 ended; the error is above"),
    ],
)
def test_the_report_names_rank_host_and_log(output: str, log: str, report: str) -> None:
    assert format_failure(3, "n2", "ended", output, log) == report


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], ""),
        (["ValueError: x"], "ValueError: x"),
        (["hpcddp: no GPU is seen", "hint: module load cuda"], "hpcddp: no GPU is seen"),
        (["hpcddp: rank 1 on n2 failed: ValueError: x"], "hpcddp: rank 1 on n2 failed: ValueError: x"),
        (["hpcddp: rank 1 on n2 failed: x", "hint: y", "hint: its log has more"], "hpcddp: rank 1 on n2 failed: x"),
        (["hpcddp: global batch: 8 = 2 x 4; 2 ranks", "hpcddp: resumed from step 9"], ""),  # it ended by itself later
        (["Segmentation fault"], "Segmentation fault"),
    ],
)
def test_what_names_the_error_is_the_program_s_last_word_and_never_news_of_the_run(lines: list[str], error: str):
    assert choose_error(lines) == error


FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f(\n    ^^\n'
RICH = """\x1b[31m╭─\x1b[0m \x1b[1;31mTraceback \x1b[0m\x1b[1;2;31m(most recent call last)\x1b[0m\x1b[31m ─╮\x1b[0m
\x1b[31m│\x1b[0m a.py:1 in <module>  \x1b[31m│\x1b[0m
\x1b[31m╰────────╯\x1b[0m
\x1b[1;31mValueError: \x1b[0mbad lr \x1b]8;;http://a\x1b\\7\x1b]8;;\x07
"""
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n====\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            f"{FRAMES}RuntimeError: CUDA error: assert\nCUDA kernel …\n\nCompile with `X`\n",
            "RuntimeError: CUDA error: assert",
        ),
        (f"{FRAMES}RuntimeError: Error(s) in loading:\n\tsize mismatch: x\n", "RuntimeError: Error(s) in loading:"),
        (f"{FRAMES}ValueError: no\nwhile reading 7.tar\n", "ValueError: no"),
        (f"{FRAMES}KeyboardInterrupt\n", "KeyboardInterrupt"),
        (f"{FRAMES}ValueError: no\n" + "wandb: Run history: x\n" * 40, "ValueError: no"),
        (f"{FRAMES}OSError: a\n\nDuring handling …:\n\n{FRAMES}KeyError: 'b'\nc: d\n", "KeyError: 'b'"),
        (f"{FRAMES}KeyError: 1\n{FRAMES}{ELASTIC}", "KeyError: 1"),
        (f"12:00 ERROR {FRAMES}KeyError: 1\nlast\n", "KeyError: 1"),
        ("".join(f"[rank3]: {line}\n" for line in f"{FRAMES}KeyError: 1\nx: y".splitlines()), "KeyError: 1"),
        (RICH, "ValueError: bad lr 7"),
    ],
)
def test_the_first_line_of_an_exception_names_the_error(text: str, error: str) -> None:
    assert choose_error(choose_lines(text)) == error
    assert len(choose_lines(text)) <= 14
