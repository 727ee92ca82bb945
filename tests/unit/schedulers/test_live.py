"""Asking the scheduler: what is typed, and what its recorded answers mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcddp.errors import RequestError, SchedulerError
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Answer
from hpcddp.schedulers.run import check_deleted, describe_answer, plan_deletion, plan_question

PBS, SLURM = find_scheduler("pbs"), find_scheduler("slurm")
CASES = json.loads((Path(__file__).parents[2] / "captures/pbs/errors_options.json").read_text())["cases"]


def recorded(what: str) -> Answer:
    case = next(c for c in CASES if c["what"] == what)
    return Answer(case["rc"], case["stdout"], case["stderr"])


def test_pbs_gets_the_script_held_and_only_if_it_is_pbs():
    assert plan_question(PBS, "pbs_version = 23.06.06\n") == ["qsub", "-h"]
    for version in (None, "Grid Engine 8.1.9", ""):
        with pytest.raises(SchedulerError, match="does not say that it is PBS"):
            plan_question(PBS, version)
    assert plan_question(SLURM, None) == ["sbatch", "--test-only"]
    with pytest.raises(RequestError):
        plan_question(find_scheduler("gridengine"), "Grid Engine 8.1.9")


def test_a_held_job_that_pbs_took_is_deleted():
    answer = recorded("queue not started")
    assert plan_deletion(PBS, answer) == ["qdel", answer.stdout.strip()]
    assert "takes the script" in describe_answer(PBS, answer)
    check_deleted(["qdel", "58.pbs1"], Answer(0, "", ""))
    with pytest.raises(SchedulerError, match=r"58\.pbs1 could not be deleted: qdel: no") as error:
        check_deleted(["qdel", "58.pbs1"], Answer(159, "", "qdel: no\n"))
    assert error.value.hint == "qdel '58.pbs1'"


@pytest.mark.parametrize("case", [c for c in CASES if c["rc"] != 0], ids=lambda c: c["what"])
def test_a_refusal_is_told_in_the_schedulers_own_words(case):
    with pytest.raises(SchedulerError) as error:
        plan_deletion(PBS, Answer(case["rc"], case["stdout"], case["stderr"]))
    first = case["stderr"].splitlines()[0].strip()
    assert first in error.value.message
    assert "usage" not in error.value.message
    assert error.value.exit_code == 5


def test_an_answer_without_a_job_id_is_not_trusted():
    with pytest.raises(SchedulerError, match="no job id"):
        plan_deletion(PBS, Answer(0, "welcome\n", ""))


def test_slurm_says_when_and_where():
    said = "sbatch: Job 12 to start at 2026-11-21T04:00:00 using 8 processors on nodes node[1-2] in partition debug\n"
    assert plan_deletion(SLURM, Answer(0, "", said)) == []
    assert "nodes node[1-2]" in describe_answer(SLURM, Answer(0, "", said))
    with pytest.raises(SchedulerError, match="invalid partition"):
        plan_deletion(SLURM, Answer(1, "", "allocation failure: invalid partition specified\n"))


@pytest.fixture
def pbs(tmp_path, run):
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
