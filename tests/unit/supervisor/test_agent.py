"""The agent of a rank, and the rank's program."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hpcddp.supervisor import agent
from tests.conftest import PATIENCE_S

AGENT = """
import os, sys
from hpcddp.supervisor import agent
stderr = agent.Stderr(os.dup(2))
program = agent.RankProgram(sys.argv[1:], dict(os.environ), stderr.entry)
stderr.start()
status = program.wait()
stderr.finish()
agent.end_alike(status)
"""
ECHO = "import sys; sys.stderr.write('first\\nlast, without an end')"
WAITING = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
signal.pause()
"""


def start(*command: str, agent: str = AGENT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", agent, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [("exit 3", 3), ("kill -9 $$", -9), ("kill -TERM $$", -15)],
)
def test_it_ends_as_the_program_ended(line: str, status: int) -> None:
    process = start("sh", "-c", line)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status


def test_every_signal_that_would_end_it_goes_on_to_the_program() -> None:
    names = ["SIGHUP", "SIGQUIT", "SIGABRT", "SIGALRM", "SIGXCPU", "SIGPROF", "SIGIO", "SIGPWR", "SIGRTMIN", "SIGUSR2"]
    process = start(sys.executable, "-c", NOTING, " ".join(names))
    assert process.stdout is not None
    process.stdout.readline()
    for name in names:
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline() == f"{name}\n"
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


ALL, THIS, WORD = agent.TO_ALL, agent.TO_THIS, agent.BY_SUPERVISOR


@pytest.mark.parametrize(
    ("came", "gets"),
    [
        ([(0, WORD)], 1),
        ([(0, ALL)], 1),
        ([(0, ALL), (1, WORD)], 1),  # scancel, of which the script hears, too
        ([(0, ALL), (2, THIS), (3, WORD)], 1),  # qdel, and an mpirun that passes it on
        ([(0, THIS), (0, THIS), (0, THIS)], 3),  # somebody sends it three times
        ([(0, ALL), (0, ALL), (1, WORD), (1, WORD)], 2),
        ([(0, ALL), (1, WORD), (2, WORD)], 2),
        ([(0, ALL), (3600, WORD)], 2),  # an hour later it is another one
    ],
)
def test_a_signal_that_comes_in_several_ways_is_had_once(came: list[tuple[float, str]], gets: int) -> None:
    now = [0.0]
    count = agent.SignalCount(lambda: now[0])
    given = 0
    for at, way in came:
        now[0] = at
        given += count.is_new(10, way) or way == ALL
    assert given == gets


NOTING = """
import os, signal, sys
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGUSR2:
        sys.exit(0)
for name in sys.argv[1].split():
    signal.signal(getattr(signal, name), note)
print(os.getppid(), flush=True)
while True:
    signal.pause()
"""
# A process of this name, which is there until the end.
SENDS = """
import os, signal, sys
open("/proc/self/comm", "w").write(sys.argv[1])
for name in sys.argv[3:]:
    os.kill(int(sys.argv[2]), getattr(signal, name))
print(flush=True)
sys.stdin.read()
"""


def test_what_a_scheduler_sends_to_every_process_is_not_given_to_the_program_again() -> None:
    process = start(sys.executable, "-c", NOTING, "SIGUSR1 SIGUSR2")
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    with ExitStack() as senders:
        for name, signals in (("slurmstepd", ["SIGUSR1"]), ("mpirun", ["SIGUSR1", "SIGUSR2"])):
            words = [sys.executable, "-c", SENDS, name, str(process.pid), *signals]
            sender = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            senders.callback(sender.communicate)
            assert sender.stdout is not None
            sender.stdout.readline()
        text, _ = process.communicate(timeout=PATIENCE_S)
    assert text == "SIGUSR2\n"  # mpirun passes on what the program has had


def test_what_a_launcher_in_a_step_passes_on_waits_for_the_scheduler_s_own() -> None:
    in_step = AGENT.replace("stderr.entry)", "stderr.entry, in_step=True)\nagent._LATER_S = 600.0")
    process = start(sys.executable, "-c", NOTING, "SIGUSR1 SIGUSR2", agent=in_step)
    assert process.stdout is not None
    process.stdout.readline()
    program = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    with ExitStack() as senders:
        for name in ("mpirun", "slurmstepd"):
            words = [sys.executable, "-c", SENDS, name, str(process.pid), "SIGUSR1"]
            sender = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            senders.callback(sender.communicate)
            assert sender.stdout is not None
            sender.stdout.readline()
            end = time.monotonic() + PATIENCE_S
            while "ShdPnd:\t0000000000000000" not in Path(f"/proc/{process.pid}/status").read_text():
                assert time.monotonic() < end  # it has not been heard yet
                time.sleep(0.001)
        os.kill(int(program), signal.SIGUSR2)
        text, _ = process.communicate(timeout=PATIENCE_S)
    assert text == "SIGUSR2\n"


GIVES = """
import json, os, sys
from hpcddp.supervisor import agent
for catches, number in json.loads(sys.argv[1]):
    said, entry = os.pipe()
    own = os.dup(1)
    os.dup2(entry, 1)  # the program's
    program = agent.RankProgram([*sys.argv[2:], f"{catches} SIGUSR2"], dict(os.environ))
    os.dup2(own, 1)
    with open(said) as lines:
        lines.readline()
        for one in (number, int(agent.signal.SIGUSR2)):
            program.give(one, agent.BY_SUPERVISOR)
            print(lines.readline(), end="", flush=True)
    program.wait()
    agent.signal.pthread_sigmask(agent.signal.SIG_SETMASK, ())
"""
GIVEN = [
    ("SIGTERM SIGINT", signal.SIGINT, "SIGTERM"),  # Ctrl-C
    ("SIGTERM", signal.SIGHUP, "SIGTERM"),
    ("SIGINT", signal.SIGINT, "SIGINT"),
    ("SIGHUP", signal.SIGHUP, "SIGHUP"),
    ("SIGUSR1 SIGTERM", signal.SIGUSR1, "SIGUSR1"),
    ("SIGTERM SIGUSR1", signal.SIGTERM, "SIGTERM"),
    ("SIGTERM SIGALRM", signal.SIGALRM, "SIGALRM"),
    ("SIGTERM", signal.SIGALRM, "SIGTERM"),  # it would end by the other, and save nothing
]


def test_the_supervisor_s_word_gives_the_program_the_signal_that_was_sent() -> None:
    cases = json.dumps([(catches, int(number)) for catches, number, _ in GIVEN])
    words = [sys.executable, "-c", GIVES, cases, sys.executable, "-c", NOTING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    expected = [name for _, _, gets in GIVEN for name in (gets, "SIGUSR2")]
    assert done.stdout.splitlines() == expected, done.stderr


# Each process says its name and number, and what it gets; all but the first end by it.
STARTS_RANKS = """
import os, signal, subprocess, sys
name, catches, *below = sys.argv[1:]
def note(number, frame):
    os.write(1, f"{name} {signal.Signals(number).name}\\n".encode())  # at once: print may write in parts
    if not below or name == "rank0":
        os._exit(0)
for one in catches.split(","):
    signal.signal(getattr(signal, one), note)
for one in below:
    child, catches = one.split(":")
    own = {"MARK": child} if child.startswith("rank") else {}
    further = ["below:SIGUSR1,SIGUSR2"] if child == "rank0" else []
    subprocess.Popen([sys.executable, "-c", sys.orig_argv[2], child, catches, *further], env=os.environ | own)
os.write(1, f"{name} {os.getpid()}\\n".encode())
while True:
    signal.pause()
"""
GIVES_RANKS = """
import os, sys
from contextlib import suppress
from hpcddp.supervisor import agent
said, entry = os.pipe()
os.dup2(1, 2)
os.dup2(entry, 1)
program = agent.RankProgram(sys.argv[1:], dict(os.environ), rank_marks=("MARK",))
with open(said) as lines:
    processes = dict(lines.readline().split() for _ in range(5))
    program.give(int(agent.signal.SIGUSR1), agent.BY_SUPERVISOR)
    for _ in range(2):
        print(lines.readline(), end="", file=sys.stderr)
    for name in ("helper", "below"):
        os.kill(int(processes[name]), agent.signal.SIGUSR2)
        print(lines.readline(), end="", file=sys.stderr)
"""


def test_the_ranks_of_an_agent_get_the_signal_that_it_would_not_pass_on_and_nobody_else_does() -> None:
    children = ["helper:SIGUSR1,SIGUSR2", "rank0:SIGUSR1,SIGTERM", "rank1:SIGTERM"]
    words = [sys.executable, "-c", GIVES_RANKS, sys.executable, "-c", STARTS_RANKS, "agent", "SIGTERM", *children]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert sorted(done.stdout.splitlines()) == ["below SIGUSR2", "helper SIGUSR2", "rank0 SIGUSR1", "rank1 SIGTERM"]


def watches_its_end(process: int) -> bool:
    """Whether the kernel is to signal the program when this process's pipe is closed: O_ASYNC, by one of its files."""
    for path in Path(f"/proc/{process}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if int(path.read_text().partition("flags:")[2].split()[0], 8) & os.O_ASYNC:
                return True
    return False


def test_the_program_does_not_outlive_it() -> None:
    process = start(sys.executable, "-c", WAITING)
    assert process.stdout is not None
    program = int(process.stdout.readline())
    waiter = os.pidfd_open(program)
    end = time.monotonic() + PATIENCE_S
    while not watches_its_end(process.pid):  # on a busy machine the program may be first
        assert time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    ended, _, _ = select.select([waiter], [], [], PATIENCE_S)
    os.close(waiter)
    process.communicate(timeout=PATIENCE_S)
    assert ended


def test_stderr_passes_whole() -> None:
    process = start(sys.executable, "-c", ECHO)
    _, text = process.communicate(timeout=PATIENCE_S)
    assert text == "first\nlast, without an end"
