"""A signal to a rendered script reaches the ranks through the real launcher: they save, and stop at the same step."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.signal_table import ALONE, SAVES, outcome, read_table

from .conftest import Flavour, find_flavour

pytestmark = pytest.mark.multirank

# what a person or a scheduler does: start the job, and signal its shell alone when both ranks have trained a little
# (signals that come together have no order: the others follow when the script has said that the first came)
_SIGNAL = """\
env --default-signal=HUP bash job.sh 2> said &
job=$!
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $job; do sleep 0.1; done
kill -FIRST $job
until grep -Eq 'came: each rank gets it|Ctrl-C' said || ! kill -0 $job; do sleep 0.01; done
for signal in OTHERS; do kill -$signal $job; done
status=0
wait $job || status=$?
cat said >&2
exit $status
"""
SLOW = pytest.mark.slow


def is_openmpi4(flavour: Flavour | None) -> bool:
    """Whose options the local site does not use."""
    return flavour is not None and flavour.prefix.name.startswith("openmpi-4")


def rendered(run, folder, flavour: Flavour | None, command: list[str]) -> str:
    """A script for two ranks on this machine."""
    site = ["--site", "local"]
    if is_openmpi4(flavour):
        (folder / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
        site = ["--site", "generic-pbs", "--gpus-per-node", "0", "--cpus-per-rank", "1", "--walltime", "1:00:00"]
    launcher = [] if command[0] == "torchrun" else ["--launcher", flavour.launcher if flavour else "torchrun"]
    request = ["hpcddp", "render", *site, "--ranks-per-node", "2", "--name", "two", *launcher]
    text = run([*request, "--", *command], cwd=folder)
    assert text.returncode == 0, text.stderr
    return text.stdout


def environment(folder, flavour: Flavour | None) -> dict[str, str]:
    pbs = {"PBS_NODEFILE": f"{folder}/nodes", "PBS_JOBID": "7.pbs"} if is_openmpi4(flavour) else {}
    return {**(flavour.env if flavour else {}), **pbs}


def stopped(run, programs, folder, flavour, *signals: str, line: str = _SIGNAL):
    """The job's end, after `signals` in the middle of its training."""
    command = [sys.executable, str(programs / "steps.py"), "10000", "0.02"]
    (folder / "job.sh").write_text(rendered(run, folder, flavour, command))
    line = line.replace("OTHERS", " ".join(signals[1:])).replace("FIRST", signals[0])
    return run(["bash", "-c", line], cwd=folder, env=environment(folder, flavour))


def assert_saved(folder, reason: str) -> None:
    state = json.loads((folder / "runs/two/state.json").read_text())
    assert (state["status"], state["reason"]) == ("unfinished", reason)
    assert {(folder / f"steps-{rank}").read_text() for rank in range(2)} == {str(state["step"])}
    assert (folder / f"runs/two/checkpoints/step-{state['step']:08d}/manifest.json").exists()


# In short: unit/script/test_running.py (the script's part) and test_staged_and_warned.py (a signal through mpirun).
@pytest.mark.parametrize(
    ("name", "signals"),
    [
        pytest.param("openmpi5", ["TERM"], marks=SLOW),
        pytest.param("mpich", ["USR2", "TERM"], marks=SLOW),
        pytest.param("openmpi5", ["USR1", "USR2", "TERM", "TERM", "INT"], marks=SLOW),
        pytest.param("openmpi4", ["TERM"], marks=SLOW),
        pytest.param("openmpi5", ["HUP"], marks=SLOW),
        pytest.param("impi", ["TERM", "USR2"], marks=SLOW),
        pytest.param("torchrun", ["TERM"], marks=SLOW),
        pytest.param("torchrun", ["HUP"], marks=SLOW),
        pytest.param("torchrun", ["USR1"], marks=SLOW),
    ],
)
def test_what_signals_come_to_the_script_stop_the_ranks_in_peace(name, signals, run, programs, repo, tmp_path):
    flavour = find_flavour(name, repo) if name != "torchrun" else None
    done = stopped(run, programs, tmp_path, flavour, *signals)
    assert done.returncode == 85, done.stdout + done.stderr
    assert f"hpcddp: SIG{signals[0]} came: each rank gets it" in done.stderr
    assert "hpcddp: unfinished: step " in done.stderr
    reason = json.loads((tmp_path / "runs/two/state.json").read_text())["reason"]
    assert reason in {f"SIG{signal}" for signal in signals}  # of several, one that came
    assert_saved(tmp_path, reason)


# what PBS does: SIGTERM to every process of the job's session (and the launchers' own handling of it)
_SIGNAL_ALL = """\
setsid env --default-signal=HUP bash job.sh &
job=$!
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $job; do sleep 0.1; done
kill -FIRST $(ps -o pid= -s $job)
wait $job
"""


# what a terminal does that is closed
_SIGNAL_GROUP = _SIGNAL_ALL.replace("$(ps -o pid= -s $job)", "-- -$job")


@pytest.mark.slow
@pytest.mark.parametrize(("signal", "line"), [("TERM", _SIGNAL_ALL), ("HUP", _SIGNAL_GROUP)])
@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_hydras_ranks_save_when_every_process_of_the_job_is_told_to_end(
    name, signal, line, run, programs, repo, tmp_path
):
    flavour = find_flavour(name, repo)
    done = stopped(run, programs, tmp_path, flavour, signal, line=line)
    assert done.returncode == 85, done.stdout + done.stderr
    assert_saved(tmp_path, json.loads((tmp_path / "runs/two/state.json").read_text())["reason"])


# The table of docs/signals.md, by running it: the launcher alone, or the script that is printed for it. What a terminal
# sends goes to all processes in its foreground.
_TABLE = """\
set -m
env --default-signal=INT,HUP LINE > said 2>&1 &
job=$!
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $job; do sleep 0.05; done
kill -SIGNAL -- TARGET$job
wait $job
touch over
"""
#: What somebody does -> the signal, and which of the launcher's and the script's processes get it.
SENT = {
    "`kill -TERM`": ("TERM", ""),
    "`kill -USR1`": ("USR1", ""),
    "`kill -USR2`": ("USR2", ""),
    "Ctrl-C": ("INT", "-"),
    f"`kill -USR1`{ALONE}": ("USR1", ""),
}
_NAMES = {"Open MPI 5": "openmpi5", "Open MPI 4": "openmpi4", "MPICH": "mpich", "Intel MPI": "impi", "torchrun": None}
_COMMAND = "torchrun as the command"  # of the job: the script starts it without a launcher
# in the script
_SHORT = {("Open MPI 5", "`kill -TERM`"), ("MPICH", "Ctrl-C"), ("Open MPI 5", f"`kill -USR1`{ALONE}")}


def _cases() -> list[ParameterSet]:
    cases = []
    for name, sent, bare, script in read_table(SENT):
        for kind, expected in (("bare", bare), ("script", script)):
            if (name, kind) == (_COMMAND, "bare"):
                continue  # torchrun's own row
            marks = () if kind == "script" and (name, sent) in _SHORT else SLOW
            cases.append(pytest.param(name, sent, kind, expected, marks=marks, id=f"{name}-{sent}-{kind}"))
    return cases


@pytest.mark.parametrize(("name", "sent", "kind", "expected"), _cases())
def test_a_program_gets_what_the_table_of_the_manual_says(name, sent, kind, expected, run, repo, tmp_path):
    """The program catches the signal that is sent and no other; at Ctrl-C SIGTERM, too."""
    flavour = find_flavour(_NAMES[name], repo) if _NAMES.get(name) else None
    signal, target = SENT[sent]
    catches = [f"0:{signal}"] if ALONE in sent else [signal, "TERM"] if signal == "INT" else [signal]
    program = [sys.executable, SAVES, *catches]
    if kind == "script":
        command = ["torchrun", "--no-python", *program] if name == _COMMAND else program
        (tmp_path / "job.sh").write_text(rendered(run, tmp_path, flavour, command))
        # a job of a scheduler has no terminal: there it is `hpcddp launch` that hears a Ctrl-C, and says so like this
        line = ["bash", "-c", "HPCDDP_LAUNCH=$$ exec bash job.sh"] if sent == "Ctrl-C" else ["bash", "job.sh"]
    elif flavour is None:
        line = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *program]
    else:
        mpirun, *options = flavour.mpirun(2)
        # Intel's mpirun is a script that dies of any signal, and leaves the ranks
        line = [mpirun.replace("mpirun", "mpiexec.hydra") if name == "Intel MPI" else mpirun, *options, *program]
    text = _TABLE.replace("LINE", shlex.join(line)).replace("SIGNAL", signal).replace("TARGET", target)
    run(["bash", "-c", text], cwd=tmp_path, env=environment(tmp_path, flavour))
    assert outcome(tmp_path, 1 if ALONE in sent else 2) == expected, (tmp_path / "said").read_text()
    if kind == "script":  # it has not finished, nor failed
        status, by, *_ = ended(tmp_path)
        fails = ALONE in sent or (name == _COMMAND and signal in {"TERM", "INT"})  # torchrun does after a SIGTERM
        assert (status == "0", by) == (not fails, f"SIG{signal}")


def test_the_table_has_every_launcher_and_what_can_be_sent():
    assert {row[:2] for row in read_table(SENT)} == {(name, sent) for name in (*_NAMES, _COMMAND) for sent in SENT}


_LAUNCH = """\
set -m
launch="hpcddp launch --here --ranks-per-node 2 --launcher openmpi --name two"
env --default-signal=INT $launch -- sh -c "$RANKS" 2> said &
job=$!
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $job; do sleep 0.05; done
"""
_CTRL_C = """\
kill -INT -- -$job
until grep -q Ctrl-C said || ! kill -0 $job; do sleep 0.05; done
kill -INT -- -$job
"""
_END = """\
wait $job
cat said >&2
"""


def ended(folder: Path) -> list[str]:
    """The exit status of the job, and the signal that ended it."""
    return (folder / "runs/two/holders/000001/ended").read_text().split()


def test_a_second_ctrl_c_kills_the_ranks(run, openmpi5, tmp_path):
    ranks = "trap '' INT TERM; touch here-$RANK; while :; do sleep 1; done"
    done = run(["bash", "-c", _LAUNCH + _CTRL_C + _END], cwd=tmp_path, env=openmpi5.env | {"RANKS": ranks})
    assert "hpcddp: Ctrl-C: the ranks save and stop; once more kills them\n" in done.stderr
    assert "hpcddp: Ctrl-C again: the ranks are killed\n" in done.stderr
    assert ended(tmp_path)[1] == "SIGINT"


def test_ranks_that_do_not_catch_it_yet_are_ended_by_the_signal_and_have_not_failed(run, openmpi5, tmp_path):
    """As hpcddp cancel does while Python still imports."""
    line = f"{_LAUNCH}kill -TERM $job\n{_END}"
    run(["bash", "-c", line], cwd=tmp_path, env=openmpi5.env | {"RANKS": "touch here-$RANK; exec sleep 1000"})
    assert ended(tmp_path) == ["143", "SIGTERM"]
