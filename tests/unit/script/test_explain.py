"""Where each value of a job came from; and that the text is no job."""

from __future__ import annotations

import subprocess

import pytest

from hpcddp.cli.main import main
from hpcddp.lint.directives import read_pbs, read_slurm
from hpcddp.script.explain import explain_plan, list_values
from hpcddp.script.plan import plan_job
from hpcddp.script.site_file import SiteChoice, open_site
from hpcddp.script.spec import read_spec

from .conftest import ENOUGH, PLANNED_BY, plan
from .gridengine import read_gridengine


def test_options_job_file_site_and_defaults_are_told_apart():
    asked = {
        "account": ("gabc12345", "account in job.yaml"),
        "env": ({"A": "1", "B": "1"}, "env in job.yaml"),
        "env.B": ("2", "--set env.B"),
        "nodes": ("3", "--nodes"),
        "conda": ("torch", "conda in job.yaml"),
        "sweep.lr": ("1,2", "--set sweep.lr"),
        "signal": ("5m", "--set signal"),
        "command": (["python", "train.py", "{lr}"], "the command after --"),
    }
    site = open_site(SiteChoice("abci3", "--site"), {})
    job = plan_job(read_spec(asked, site.vars), site, PLANNED_BY)
    values = {key: (value, source) for key, value, source in list_values(job)}
    jobs, modules = (
        f"(https://docs.abci.ai/v3/en/{page}/, 2026-01-30)" for page in ("job-execution", "environment-modules")
    )
    assert values["account"] == ("gabc12345", "account in job.yaml")
    assert values["queue"] == ("rt_HF", "site abci3: queue")
    assert values["gpus_per_node"] == (8, f"site abci3: queue rt_HF {jobs}")
    assert values["ranks_per_node"] == (8, "default: one per GPU")
    assert values["walltime"] == (3600, f"site abci3: walltime {jobs}")
    assert values["launcher"][1].startswith("site abci3: launcher (")
    assert values["python"][1] == "conda in job.yaml"
    assert values["modules.init"] == ("source /etc/profile.d/modules.sh", f"site abci3: modules.init {modules}")
    assert values["env.A"] == ("1", "env in job.yaml")
    assert values["env.B"] == ("2", "--set env.B")
    assert values["sweep.lr"] == (("1", "2"), "--set sweep.lr")
    lines = explain_plan(job).splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith(("name ", "signal "))] == [
        "default: made from the command",
        "--set signal",
    ]
    assert next(line for line in lines if line.startswith("signal ")).split()[1] == "00:05:00"


@pytest.mark.parametrize("site", ENOUGH)
def test_on_each_site_each_value_is_there_once(site):
    keys = [line.split()[0] for line in explain_plan(plan(site)).splitlines()[4:]]
    assert {"nodes", "ranks_per_node", "walltime", "launcher", "run_dir"} <= {*keys} - {"mem_gb"} == {*keys}
    assert len(keys) == len({*keys})


def test_no_scheduler_and_no_shell_takes_an_explanation_for_a_job():
    text = explain_plan(plan("generic-pbs"))
    assert read_pbs(text).refusals
    assert read_slurm(text).refusals
    assert subprocess.run(["bash"], input=text, text=True, capture_output=True, check=False).returncode == 2
    assert read_gridengine(text).options[0].name == "-hpcddp-explains-and-queues-nothing"


def test_it_is_printed_when_asked_for(capsys):
    request = ["--site", "generic-pbs", "--gpus-per-node", "1", "--cpus-per-rank", "2", "--walltime", "1:00:00"]
    assert main(["render", "--explain", "--no-check", *request, "--", "true"]) == 0
    assert "  --walltime\n" in capsys.readouterr().out
