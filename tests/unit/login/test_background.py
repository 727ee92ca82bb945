"""The verbs on a machine without a scheduler, with real jobs in its background; and `hpcddp.Job`."""

from __future__ import annotations

import array
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hpcddp
from hpcddp.cli.main import main
from hpcddp.errors import LaunchError, RequestError, SchedulerError
from hpcddp.login.find_run import find_run
from hpcddp.login.judge import LIVE, RunStatus, find_status

from .conftest import JOB

PATIENCE_S = 120
WAITS = "import os, time\nopen('here', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)"


def status(name: str) -> RunStatus:
    return find_status([find_run(name)], os.environ).runs[0]


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def ended(name: str) -> RunStatus:
    until(lambda: status(name).state not in LIVE)
    return status(name)


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["submit", *JOB, *words]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture(autouse=True)
def nothing_left(here: Path) -> object:
    yield
    (here / "go").touch()
    for run in (here / "runs").glob("*"):
        main(["cancel", str(run), "--now"])


def test_a_job_runs_in_the_background_and_leaves_its_status_and_its_output(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(capsys, "--name", "a", "--", "python", "-c", f"{WAITS}\nprint('said'); raise SystemExit(3)")
    until((here / "here").exists)
    assert (status("a").state, status("a").job) == ("running", job)
    assert main(["submit", *JOB, "--name", "a", "--", "true"]) == 2
    assert "cannot write one run\nhint: wait for its end; or another run: --name X" in capsys.readouterr().err
    (here / "go").touch()
    assert (ended("a").state, ended("a").exit_status) == ("failed", 3)
    assert main(["logs", "a"]) == 0
    assert "said\n" in capsys.readouterr().out
    assert "said\n" in (here / "runs/a/submitted/000001/output").read_text()


def test_a_sweep_runs_one_after_another_and_what_waits_can_be_taken_back(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import sys\nopen(sys.argv[1], 'w')\n{WAITS}"
    ids = submit(capsys, "--name", "s", "--set", "sweep.x=1-3", "--", "python", "-c", code, "{x}").split()
    assert len(ids) == 3
    until((here / "here").exists)
    assert main(["cancel", "s.2"]) == 0
    assert ended("s.2").state == "cancelled"
    assert status("s.3").state == "queued"
    (here / "go").touch()
    assert ended("s.3").state == "finished"
    assert not (here / "2").exists()
    with pytest.raises(RequestError, match="is a sweep"):
        hpcddp.Job(run="s").logs()
    with pytest.raises(RequestError, match="no log of rank 99"):
        hpcddp.Job(run="s.1").logs(99)


@pytest.mark.parametrize("option", [["--array", "1-3"], ["--after", "afterany:local-1"]])
def test_a_machine_without_a_scheduler_takes_no_arrays_and_no_dependencies(
    here: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert main(["submit", *JOB, *option, "--", "true"]) == 2
    assert "site local cannot take" in capsys.readouterr().err


def test_now_kills_the_job_and_all_that_it_started(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deaf = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('pid', 'w').write(str(os.getpid()))"
    submit(capsys, "--name", "a", "--", "python", "-c", f"{deaf}\n{WAITS}")
    until((here / "here").exists)
    rank = int((here / "pid").read_text())
    assert main(["cancel", "a", "--now"]) == 0
    assert (ended("a").state, ended("a").why) == ("cancelled", "SIGKILL")
    until(lambda: not Path(f"/proc/{rank}").exists() or " Z " in Path(f"/proc/{rank}/stat").read_text())


@pytest.mark.parametrize("now", [False, True])
def test_what_was_launched_in_a_terminal_is_shown_ended_and_keeps_others_out(
    here: Path, capsys: pytest.CaptureFixture[str], now: bool
) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if now else ""
    words = ["--ranks-per-node", "1", "--name", "a", "--", "python", "-c", f"{deaf}{WAITS}"]
    line = [sys.executable, "-m", "hpcddp", "launch", "--here", *words]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launched:
        try:
            until((here / "here").exists)
            assert status("a").state == "running"
            assert main(["submit", *JOB, *words[2:]]) == 2
            assert f"job {status('a').job} (running) has runs/a" in capsys.readouterr().err
            assert main(["cancel", status("a").job, *["--now"][: int(now)]]) == 0
            assert launched.wait(PATIENCE_S) != 0
            assert status("a").state == "cancelled"
        finally:
            launched.kill()


def test_a_job_from_python_has_the_same_verbs(here: Path) -> None:
    job = hpcddp.Job(["python", "-c", WAITS], site="local", ranks_per_node=1, name="a", env={"A": 1})
    assert job.render().startswith("#!/bin/bash\n")
    with pytest.raises(LaunchError, match="was not submitted"):
        job.status()
    number = job.submit()
    assert job.status().job == number
    with pytest.raises(TimeoutError, match="after 0 s"):
        job.wait(timeout_s=0)
    until((here / "here").exists)
    (here / "go").touch()
    assert job.wait(PATIENCE_S, every_s=0.05).state == "finished"
    assert job.logs() == ""
    again = hpcddp.Job(run="a")
    assert again.status()._replace(path=job.status().path) == job.status()
    again.cancel()


def test_what_is_wrong_in_python_is_said_in_two_lines(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="Job\\(\\) has no command"):
        hpcddp.Job()
    with pytest.raises(RequestError, match="takes no other argument"):
        hpcddp.Job("true", run="a")
    with pytest.raises(RequestError, match=r"unknown key 'node' \(Job\(node=…\)\)"):
        hpcddp.Job("python t.py", site="local", node=3).render()
    with pytest.raises(RequestError, match="there is no run 'a'"):
        hpcddp.Job(run="a").status()
    (here / "sbatch").write_text("#!/bin/sh\necho no >&2; exit 1\n")  # a stand-in for one that refuses
    (here / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    slurm = hpcddp.Job(["python", "-c", "1"], site="generic-slurm", gpus_per_node=0, cpus_per_node=1, walltime="1h")
    with pytest.raises(SchedulerError, match="sbatch refuses the job"):
        slurm.submit()


def test_importing_job_brings_no_torch() -> None:
    code = "import hpcddp, sys; hpcddp.Job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_that_is_submitted_fresh_begins_the_run_that_submit_has_made_for_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--name", "a", "--", "python", "-c", "print('said')"]
    first = submit(capsys, *words)
    assert ended("a").job == first
    again = submit(capsys, "--fresh", *words)
    assert (ended("a").state, ended("a").job) == ("finished", again)
    assert (ended("a.old1").state, ended("a.old1").job) == ("finished", first)
    assert sorted(os.listdir("runs")) == ["a", "a.old1"]
    assert "hpcddp: run runs/a: new\n" in (here / "runs/a/submitted/000001/output").read_text()


def test_a_job_without_a_supervisor_is_ended_with_all_that_it_started_and_nobody_says_how(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import os\nopen('pid', 'w').write(str(os.getpid()))\n{WAITS}"
    submit(capsys, "--name", "a", "--set", "supervise=false", "--", "python", "-c", code)
    until((here / "here").exists)
    assert (status("a").state, status("a").why) == ("running", "")
    rank = int((here / "pid").read_text())
    assert main(["cancel", "a"]) == 0
    until(lambda: not Path(f"/proc/{rank}").exists() or " Z " in Path(f"/proc/{rank}/stat").read_text())
    assert ended("a").state == "ended"
    assert "supervise: false" in status("a").why


def test_values_from_python_are_those_of_yaml_and_arrays_are_lists(here: Path) -> None:
    rates = array.array("d", [0.5, 0.25])  # as one of numpy, which the login node's side does not ask for
    of_array = hpcddp.Job("echo {lr}", site="generic-slurm", nodes=1, sweep={"lr": rates})
    assert "sweep: {lr: [0.5, 0.25]}" in repr_of_sweep(of_array)
    for value in ({"a"}, b"a", (one for one in "a"), {"A": None}):
        with pytest.raises(RequestError, match=r"Job\(env=…\) has a value of type"):
            hpcddp.Job("true", site="local", env=value).render()


def repr_of_sweep(job: hpcddp.Job) -> str:
    return "sweep: {lr: [" + ", ".join(job._read_keys()["sweep"][0]["lr"]) + "]}"  # type: ignore[index]  # it is a mapping
