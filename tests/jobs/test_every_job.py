"""Every job of jobs/ renders for PBS and Slurm, and lint finds no mistake in its script and its program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from tests.jobs.rows import JOBS, ROWS

FILES = sorted(str(path.relative_to(JOBS)) for path in JOBS.rglob("*.yaml"))
SIZE = ["--gpus-per-node", "2", "--cpus-per-rank", "4", "--walltime", "1:00:00"]
SITES = {"abci3": ["--account", "gaa50000"], "generic-slurm": ["--queue", "gpu", *SIZE]}


@pytest.mark.parametrize("job", FILES)
def test_a_job_renders_and_lint_finds_nothing_in_its_script(job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir((JOBS / job).parent)
    script = tmp_path / "job.sh"
    for name, asked in SITES.items():
        if name == "generic-slurm" and job.startswith("abci/"):
            continue
        assert main(["render", Path(job).name, "--site", name, *asked]) == 0, capsys.readouterr().err
        script.write_text(capsys.readouterr().out)
        assert main(["lint", "--site", name, str(script)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("program", sorted(str(path.relative_to(JOBS)) for path in JOBS.rglob("*.py")))
def test_lint_finds_in_a_jobs_program_what_its_row_says_and_nothing_else(program, capsys):
    expected = {rule for row in ROWS for rule in row.lint if JOBS / program == (JOBS / row.job).with_suffix(".py")}
    main(["lint", "--json", str(JOBS / program)])
    assert {found["rule"] for found in json.loads(capsys.readouterr().out)["findings"]} == expected


def test_every_job_has_its_row():
    assert {job for row in ROWS for job in (row.job, *row.also)} | {"digits.yaml"} == set(FILES)


def test_a_program_is_short(repo):
    for program in (repo / "jobs").rglob("*.py"):
        assert len(program.read_text().splitlines()) <= 60, program
