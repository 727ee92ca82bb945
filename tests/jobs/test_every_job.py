"""Every job of jobs/ renders for PBS and Slurm, and lint finds no mistake in its script and its program."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from tests.jobs.choosing import NAMES
from tests.jobs.rows import JOBS, ROWS

SWEEPS = {"abci/scaling.yaml": {"select": ["1", "4"]}}  # several scripts, which `hpcddp submit` makes
FILES = sorted({str(path.relative_to(JOBS)) for path in JOBS.rglob("*.yaml")} - SWEEPS.keys())
SIZE = ["--gpus-per-node", "2", "--cpus-per-rank", "4", "--walltime", "1:00:00"]
SITES = {"abci3": ["--account", "gaa50000"], "generic-slurm": ["--queue", "gpu", *SIZE]}


@pytest.mark.parametrize("job", FILES)
def test_a_job_renders_and_lint_finds_nothing_in_its_script(job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir((JOBS / job).parent)
    renders = next((row.renders for row in ROWS if job in (row.job, *row.also)), "")
    nodes = ["--nodes", "2"] if renders.startswith("any number of nodes") else []
    for site, asked in SITES.items():
        if site == "generic-slurm" and "ABCI" in renders:
            continue
        assert main(["render", Path(job).name, "--site", site, *asked, *nodes]) == 0, capsys.readouterr().err
        (tmp_path / "job.sh").write_text(capsys.readouterr().out)
        assert main(["lint", "--site", site, str(tmp_path / "job.sh")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("job", SWEEPS)
def test_a_sweep_is_one_script_for_each_value_which_differ_in_it_alone(job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir((JOBS / job).parent)
    assert main(["submit", Path(job).name, "--account", "gaa50000", "--dry-run"]) == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash\n")[1:]
    ((name, values),) = SWEEPS[job].items()
    assert len(scripts) == len(values)
    for script, value in zip(scripts, values, strict=True):
        assert f" {name}={value}:" in script
        assert " --global-batch 256 " in script
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{script}")
        assert main(["lint", "--site", "abci3", str(tmp_path / "job.sh")]) == 0, capsys.readouterr().out
        capsys.readouterr()


@pytest.mark.parametrize("program", sorted(str(path.relative_to(JOBS)) for path in JOBS.rglob("*.py")))
def test_lint_finds_in_a_jobs_program_what_its_row_says_and_nothing_else(program, capsys):
    expected = {rule for row in ROWS for rule in row.lint if JOBS / program == (JOBS / row.job).with_suffix(".py")}
    main(["lint", "--json", str(JOBS / program)])
    assert {found["rule"] for found in json.loads(capsys.readouterr().out)["findings"]} == expected


def test_every_job_has_its_row():
    assert {job for row in ROWS for job in (row.job, *row.also)} | {"digits.yaml"} == set(FILES)


def test_every_row_says_when_to_choose_it():
    assert {row.name for row in ROWS} == NAMES


def test_a_program_is_short(repo):
    for program in (repo / "jobs").rglob("*.py"):
        assert len(program.read_text().splitlines()) <= 60, program


def test_a_script_that_starts_its_ranks_at_localhost_is_refused_on_two_nodes(monkeypatch, capsys):
    monkeypatch.chdir(JOBS / "plain")
    asked = ["--site", "abci3", "--account", "gaa50000", "--nodes", "2"]
    assert main(["render", "spawn.yaml", *asked]) == 2
    assert "spawn.py" in capsys.readouterr().err


def test_the_page_is_the_one_that_the_rows_make(repo):
    spec = importlib.util.spec_from_file_location("make_strategies", repo / "docs/make_strategies.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert (repo / "docs/strategies.md").read_text() == maker.page(), "python docs/make_strategies.py"
