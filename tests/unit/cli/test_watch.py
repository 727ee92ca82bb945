"""The screen of `hpcddp watch`: what it says of run folders, how it fits into terminals, how it starts and ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from hpcddp.cli.main import main
from hpcddp.cli.watch_screen import Screen, draw_curve
from hpcddp.login.watched import Watcher
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import write_object
from hpcddp.runs.lock import describe_process, take_run
from hpcddp.runs.submitted import JobEnd, record_job_end
from tests.conftest import PATIENCE_S
from tests.unit.chain_run import write_chain_run


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with runs/chain: two attempts of a chain."""
    monkeypatch.chdir(tmp_path)
    write_chain_run(tmp_path / "runs/chain")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunFolder:
    return RunFolder(str(folder / "runs/chain"))


@pytest.fixture
def supervisor():
    """A process that lives as long as the test wants."""
    one = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield one
    one.kill()
    one.communicate()


def hold(run: RunFolder, attempt: str, supervisor: subprocess.Popen[bytes]) -> None:
    mine = describe_process(attempt, supervisor.pid, {}, ("python", "train.py"))
    take_run(run, mine, lambda _scheduler, _job: "gone", before=attempt)
    os.makedirs(os.path.join(run.attempt(attempt).path, "logs"), exist_ok=True)


def draw(run: RunFolder, width: int = 100, height: int = 40) -> list[str]:
    watcher = Watcher(run, dict(os.environ))
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as drawn:
        console.print(Screen(watcher.poll(), watcher.curve), end="", height=height)
    return drawn.get().split("\n")


def test_a_running_attempt_is_shown_with_its_deadline_checkpoint_attempts_and_log(run: RunFolder, supervisor):
    hold(run, "43.pbs1.1", supervisor)
    now = int(time.time())
    attempt = run.attempt("43.pbs1.1")
    record_job_end(attempt, JobEnd("pbs", "43.pbs1", 1, now + 7200, "as qstat says", now + 7000))
    line = {"kind": "step", "step": 500, "epoch": 3, "loss": 0.25, "samples_per_s": 400.0, "time": now}
    with open(attempt.metrics, "w", encoding="utf-8") as file:
        file.write('{"kind": "expect", "total_steps": 1000, "time": 1}\n' + json.dumps(line) + "\n")
    with open(attempt.log, "w", encoding="utf-8") as file:
        file.write("first\nbar 1\rbar 2\rbar 3\n\x1b[31mred\x9b2J\n")
    Path(run.attempt("42.pbs1.1").lost).write_text("rank 3 on n7 was killed by SIGKILL\n")
    lines = draw(run)
    assert lines[0].split() == ["chain", "running"]
    assert lines[1].rstrip() == "step 500 of 1000  epoch 3  loss 0.25  400 samples/s"
    text = "\n".join(lines)
    assert "job ends   in 01:59:5" in text or "job ends   in 02:00:0" in text
    assert "(as qstat says); the ranks are warned at " in text
    assert "rank 3 on n7 was killed by SIGKILL" in text
    assert "  43.pbs1.1  steps 500 to 500" in text
    assert "  first" in text
    assert "  bar 3" in text
    assert "bar 1" not in text
    assert "  red 2J" in text


def test_the_curve_is_that_of_all_attempts_with_its_largest_and_smallest_loss(run: RunFolder):
    seen = Watcher(run, dict(os.environ))
    seen.poll()
    texts = [path.read_text() for path in sorted(Path(run.attempts).glob("*/metrics.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    steps = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    assert dict(zip(seen.curve.steps, seen.curve.losses, strict=True)) == steps
    drawn = draw(run)
    title = next(at for at, line in enumerate(drawn) if line.strip() == "loss")
    assert any(0x2800 <= ord(one) < 0x2900 for one in drawn[title + 1])
    assert any(line.split()[:2] == ["step", str(min(steps))] and line.split()[-1] == str(max(steps)) for line in drawn)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 2), (80, 8), (80, 24), (100, 60)])
def test_the_screen_fits_into_a_terminal_of_any_size(run: RunFolder, supervisor, width: int, height: int):
    hold(run, "43.pbs1.1", supervisor)
    lines = draw(run, width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_of_a_run_on_another_machine_its_scheduler_is_asked_and_a_silent_one_is_said(run: RunFolder, supervisor):
    hold(run, "43.pbs1.1", supervisor)
    path = os.path.join(run.holders, "000003", "holder.json")
    holder = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(holder | {"host": "n7", "machine": "other", "scheduler": "pbs", "job": "43.pbs1"}))
    status = Watcher(run, dict(os.environ)).poll().status
    assert (status.state, status.why) == ("unknown", "the scheduler does not answer")


def test_without_a_terminal_and_for_a_sweep_it_says_what_to_type(run: RunFolder, capsys, monkeypatch):
    assert main(["watch", "chain"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: hpcddp status chain"
    write_object(run.sweep, {"axes": {"lr": ["1", "2"]}, "array": "1-2"})
    assert main(["watch", "chain"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: hpcddp watch chain.1"


def test_without_rich_it_says_how_to_get_it_and_what_needs_none(run: RunFolder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["watch", "chain"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "hint: pip install 'hpcddp[watch]', or without it: hpcddp status --watch chain"


def _listens() -> None:
    """A shell without a terminal starts what runs in its background with SIGINT ignored, these tests as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`hpcddp watch chain` in a pseudo terminal."""

    def __init__(self, folder: Path) -> None:
        self.entry, far = pty.openpty()
        self.far = far
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(far)
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TERM": "xterm", "PYTHONUTF8": "1"}
        argv = [sys.executable, "-m", "hpcddp", "watch", "chain"]
        self.process = subprocess.Popen(
            argv, stdin=far, stdout=far, stderr=far, cwd=folder, env=env, start_new_session=True, preexec_fn=_listens
        )

    def read_until(self, text: bytes) -> bytes:
        read, end = b"", time.monotonic() + PATIENCE_S  # the screen is drawn again and again
        while text not in read:
            assert time.monotonic() < end, read
            assert select.select([self.entry], [], [], PATIENCE_S)[0], read
            read += os.read(self.entry, 65536)
        return read

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.entry)
        os.close(self.far)


@pytest.fixture
def terminal(folder: Path):
    one = Terminal(folder)
    yield one
    one.close()


def test_a_signal_ends_it_with_130_and_the_terminal_is_as_it_was(terminal: Terminal):
    assert b"\x1b[?1049h" in terminal.read_until(b"Ctrl-C ends this")
    terminal.process.send_signal(signal.SIGINT)
    said = terminal.read_until(b"interrupted")
    assert b"\x1b[?1049l" in said
    assert b"Traceback" not in said
    assert terminal.process.wait(PATIENCE_S) == 130
    assert termios.tcgetattr(terminal.far) == terminal.before


def test_the_largest_value_is_at_the_top_gaps_are_left_out_and_what_is_steep_is_joined():
    assert draw_curve([3.0, 3.0, 0.0, 0.0], 2, 1) == ["⠉⣆"]
    assert draw_curve([1.0, None, 0.0], 2, 1) == ["⠁⡀"]
    assert draw_curve([1.0, 0.0], 1, 2) == ["⢱", "⢸"]
    assert draw_curve([2.0, 2.0], 1, 1) == ["⠤"]
