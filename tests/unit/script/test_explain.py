"""Where each line of a script came from; and that the text is no job."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.cli.main import main
from hpcddp.lint.directives import read_pbs, read_slurm
from hpcddp.script.explain import explain_script, list_plan_sources
from hpcddp.script.plan import plan_job
from hpcddp.script.site_file import SiteChoice, open_site
from hpcddp.script.spec import read_spec

from .conftest import ENOUGH, PLANNED_BY, plan, script
from .gridengine import read_gridengine


def explain(site: str, **values: object) -> dict[str, str]:
    """Line -> its sources."""
    text = explain_script(plan(site, **values))
    pairs = (line.rpartition(" | ") if " | " in line else (line, "", "") for line in text.splitlines())
    return {line.strip(): why for line, _, why in pairs}


@pytest.mark.parametrize("site", ENOUGH)
def test_every_line_of_the_script_is_there_in_order(site):
    text = explain_script(plan(site))
    at = 0
    for line in script(site).splitlines():
        at = text.index(line, at)


def test_options_job_file_site_and_defaults_are_told_apart():
    asked = {
        "account": ("gabc12345", "account in job.yaml"),
        "env": ({"A": "1", "B": "1"}, "env in job.yaml"),
        "env.B": ("2", "--set env.B"),
        "nodes": ("3", "--nodes"),
        "command": (["python", "train.py"], "the command after --"),
    }
    site = open_site(SiteChoice("abci3", "--site"), {})
    text = explain_script(plan_job(read_spec(asked, site.vars), site, PLANNED_BY))
    lines = {line.rpartition(" | ")[0].strip() or line: line.rpartition(" | ")[2] for line in text.splitlines()}
    assert lines["#PBS -N train"] == "default: made from the command"
    assert lines["#PBS -P gabc12345"] == "account in job.yaml"
    assert lines["#PBS -q rt_HF"] == "site abci3: queue"
    assert lines["#PBS -l select=3:mpiprocs=8:ompthreads=12"].startswith(
        "--nodes; default: one per GPU; site abci3: queue"
    )
    assert lines["#PBS -l walltime=01:00:00"].startswith("site abci3: walltime")
    assert "https://docs.abci.ai/v3/en/environment-modules/, 2026" in lines["module load hpcx/2.20 || exit"]
    init = "site abci3: modules.init (https://docs.abci.ai/v3/en/environment-modules/, 2026-01-30)"
    assert lines["source /etc/profile.d/modules.sh"] == init
    assert lines["export A=1"] == "env in job.yaml"
    assert lines["export B=2"] == "--set env.B"
    assert "set -e # from here on a line that fails ends the job" in text.splitlines()


def test_a_derived_value_is_followed_to_what_it_is_worked_out_from():
    lines = explain("generic-slurm", nodes="3", ranks_per_node="4")
    launch = next(why for line, why in lines.items() if line.startswith("srun --nodes=3 --ntasks=12"))
    assert launch == "--nodes; --ranks_per_node"


def test_each_value_of_a_plan_has_its_source():
    sources = list_plan_sources(plan("abci3", nodes="3", venv="/v", env={"A": "1"}))
    assert (sources["nodes"], sources["python"], sources["env.A"]) == ("--nodes", "--venv", "--env")
    assert sources["walltime"].startswith("site abci3: walltime")
    assert sources["ranks_per_node"] == "default: one per GPU"


def test_no_scheduler_and_no_shell_takes_an_explanation_for_a_job():
    text = explain_script(plan("generic-pbs"))
    assert read_pbs(text).refusals
    assert read_slurm(text).refusals
    assert subprocess.run(["bash"], input=text, text=True, capture_output=True, check=False).returncode == 2
    assert read_gridengine(text).options[0].name == "-hpcddp-explains-and-queues-nothing"


def test_it_is_printed_when_asked_for(capsys):
    request = ["--site", "generic-pbs", "--gpus-per-node", "1", "--cpus-per-rank", "2", "--walltime", "1:00:00"]
    assert main(["render", "--explain", "--no-check", *request, "--", "true"]) == 0
    assert "| --walltime\n" in capsys.readouterr().out
    assert main(["render", "--explain", "--interactive", *request, "--", "true"]) == 2
