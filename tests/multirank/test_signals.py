"""A signal to a rendered script reaches the ranks through the real launcher: they save, and stop at the same step."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from .conftest import find_flavour

pytestmark = pytest.mark.multirank

# what a person or a scheduler does: start the job, and signal its shell alone when both ranks have trained a little
# (signals that come together have no order: the others follow when the script has said that the first came)
_SIGNAL = """\
env --default-signal=HUP bash job.sh 2> said &
job=$!
until [ -e here-0 ] && [ -e here-1 ] || ! kill -0 $job; do sleep 0.1; done
kill -FIRST $job
until grep -q 'came and was passed on' said || ! kill -0 $job; do sleep 0.01; done
for signal in OTHERS; do kill -$signal $job; done
status=0
wait $job || status=$?
cat said >&2
exit $status
"""
SLOW = pytest.mark.slow


def stopped(run, programs, folder, flavour, launcher: str, *signals: str, line: str = _SIGNAL):
    """The job's end, after `signals` in the middle of its training."""
    site = ["--site", "local"]
    if flavour is not None and flavour.prefix.name.startswith("openmpi-4"):  # whose options the local site does not use
        (folder / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
        site = ["--site", "generic-pbs", "--gpus-per-node", "0", "--cpus-per-rank", "1", "--walltime", "1:00:00"]
    pbs = {"PBS_NODEFILE": f"{folder}/nodes", "PBS_JOBID": "7.pbs"} if "generic-pbs" in site else {}
    request = ["hpcddp", "render", *site, "--ranks-per-node", "2", "--name", "two", "--launcher", launcher]
    text = run([*request, "--", sys.executable, programs / "steps.py", "10000", "0.02"], cwd=folder)
    assert text.returncode == 0, text.stderr
    (folder / "job.sh").write_text(text.stdout)
    env = {**(flavour.env if flavour else {}), **pbs}
    line = line.replace("OTHERS", " ".join(signals[1:])).replace("FIRST", signals[0])
    return run(["bash", "-c", line], cwd=folder, env=env)


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
    ],
)
def test_what_signals_come_to_the_script_stop_the_ranks_in_peace(name, signals, run, programs, repo, tmp_path):
    flavour = find_flavour(name, repo)
    done = stopped(run, programs, tmp_path, flavour, flavour.launcher, *signals)
    assert done.returncode == 85, done.stdout + done.stderr
    assert f"hpcddp: SIG{signals[0]} came and was passed on as SIGUSR1" in done.stderr
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


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "HUP"])
@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_hydras_ranks_save_when_every_process_of_the_job_is_told_to_end(name, signal, run, programs, repo, tmp_path):
    flavour = find_flavour(name, repo)
    done = stopped(run, programs, tmp_path, flavour, flavour.launcher, signal, line=_SIGNAL_ALL)
    assert done.returncode == 85, done.stdout + done.stderr
    assert_saved(tmp_path, json.loads((tmp_path / "runs/two/state.json").read_text())["reason"])


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "INT", "HUP"])
def test_under_open_mpi_that_leaves_the_last_checkpoint_and_no_process(signal, run, programs, openmpi5, tmp_path):
    done = stopped(run, programs, tmp_path, openmpi5, "openmpi", signal, line=_SIGNAL_ALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hpcddp: the launcher ended with status 1" in done.stderr
    assert json.loads((tmp_path / "runs/two/state.json").read_text())["status"] in {"unfinished", "failed"}
    assert list((tmp_path / "runs/two/checkpoints").glob("step-????????/manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "HUP"])
def test_torchrun_gives_its_ranks_time_to_save_although_it_fails(signal, run, programs, tmp_path):
    done = stopped(run, programs, tmp_path, None, "torchrun", signal)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"hpcddp: SIG{signal} came and was passed on as SIGTERM" in done.stderr
    assert_saved(tmp_path, f"SIG{signal}")


@pytest.mark.slow  # with status 0 in the demo, too
def test_a_finished_run_ends_with_0(run, programs, openmpi5, tmp_path):
    render = ["hpcddp", "render", "--site", "local", "--name", "two", "--"]
    text = run([*render, sys.executable, programs / "steps.py", "1", "0"], cwd=tmp_path).stdout
    done = run(["bash"], stdin=text, cwd=tmp_path, env=openmpi5.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "runs/two/state.json").read_text())["status"] == "finished"
