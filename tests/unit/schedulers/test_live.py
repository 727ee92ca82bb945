"""Asking the scheduler: what is typed, and what its recorded answers mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcddp.errors import RequestError, SchedulerError
from hpcddp.schedulers import run
from hpcddp.schedulers.row import CommandAnswer

CASES = json.loads((Path(__file__).parents[2] / "captures/pbs/errors_options.json").read_text())["cases"]


def recorded(what: str) -> CommandAnswer:
    case = next(c for c in CASES if c["what"] == what)
    return CommandAnswer(case["rc"], case["stdout"], case["stderr"])


@pytest.fixture
def ask(monkeypatch):
    """Asks a scheduler whose commands give these answers, in this order; what it said, and the commands."""

    def ask(name: str, *answers: CommandAnswer) -> tuple[str, list[list[str]]]:
        left, asked = list(answers), []
        monkeypatch.setattr(run, "run_program", lambda argv, *_, **__: asked.append(argv) or left.pop(0))
        return run.ask_scheduler(name, "script", {}), asked

    return ask


PBS = CommandAnswer(0, "pbs_version = 23.06.06\n", "")


def test_pbs_gets_the_script_held_only_if_it_is_pbs_and_the_job_is_deleted(ask):
    answer = recorded("queue not started")
    said, asked = ask("pbs", PBS, answer, CommandAnswer(0, "", ""))
    assert said == "PBS takes the script (submitted held, and deleted)"
    assert asked == [["qsub", "--version"], ["qsub", "-h"], ["qdel", answer.stdout.strip()]]
    with pytest.raises(SchedulerError, match=r"could not be deleted: qdel: no") as error:
        ask("pbs", PBS, answer, CommandAnswer(159, "", "qdel: no\n"))
    assert error.value.hint == f"qdel '{answer.stdout.strip()}'"
    for version in ("Grid Engine 8.1.9", ""):
        with pytest.raises(SchedulerError, match="does not say that it is PBS"):
            ask("pbs", CommandAnswer(0, version, ""))
    with pytest.raises(SchedulerError, match="no job id"):
        ask("pbs", PBS, CommandAnswer(0, "welcome\n", ""))


def test_a_scheduler_without_such_a_command_is_a_request_error(ask):
    with pytest.raises(RequestError):
        ask("gridengine")


@pytest.mark.parametrize("case", [c for c in CASES if c["rc"] != 0], ids=lambda c: c["what"])
def test_a_refusal_is_told_in_the_schedulers_own_words(ask, case):
    with pytest.raises(SchedulerError) as error:
        ask("pbs", PBS, CommandAnswer(case["rc"], case["stdout"], case["stderr"]))
    first = case["stderr"].splitlines()[0].strip()
    assert first in error.value.message
    assert "usage" not in error.value.message
    assert error.value.exit_code == 5


def test_slurm_says_when_and_where(ask):
    said = "sbatch: Job 12 to start at 2026-11-21T04:00:00 using 8 processors on nodes node[1-2] in partition debug\n"
    told, asked = ask("slurm", CommandAnswer(0, "", said))
    assert "nodes node[1-2]" in told
    assert asked == [["sbatch", "--test-only"]]
    with pytest.raises(SchedulerError, match="invalid partition"):
        ask("slurm", CommandAnswer(1, "", "allocation failure: invalid partition specified\n"))


@pytest.fixture
def pbs(tmp_path, run):  # the fixture, not the module
    """A qsub and a qdel that write down what they were given, and answer as OpenPBS does."""

    def render(answer: str, *words: str):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        version = '[ "$1" = --version ] && echo "pbs_version = 23.06.06" && exit'
        (folder / "qsub").write_text(f"#!/bin/sh\n{version}\ncat > {tmp_path}/script\n{answer}\n")
        (folder / "qdel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/deleted\n')
        for program in folder.iterdir():
            program.chmod(0o755)
        path = f"{Path(sys.executable).parent}:{folder}:/usr/bin:/bin"
        options = ["--site", "generic-pbs", "--gpus-per-node", "1", "--cpus-per-rank", "2", "--walltime", "1:00:00"]
        argv = ["hpcddp", "render", *options, *words, "--", "true"]
        return run(argv, cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": path})

    return render


def test_the_rendered_script_is_asked_about_only_when_that_is_said(pbs, tmp_path):
    assert pbs("echo 7.pbs1").returncode == 0
    assert not (tmp_path / "script").exists()
    done = pbs("echo 7.pbs1", "--check=live")
    assert (done.returncode, (tmp_path / "deleted").read_text()) == (0, "7.pbs1\n")
    assert (tmp_path / "script").read_text() == done.stdout
    assert "PBS takes the script" in done.stderr


def test_a_refused_script_is_not_printed_and_the_status_is_5(pbs, tmp_path):
    done = pbs('echo "qsub: Unknown queue" >&2; exit 170', "--check=live")
    assert done.returncode == 5
    assert "qsub refuses the script (status 170): qsub: Unknown queue" in done.stderr
    assert "#!" not in done.stdout
    assert not (tmp_path / "deleted").exists()
