"""`hpcddp render` and `hpcddp sites` as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.script.site_file import site_files
from tests.job_script import order_in


@pytest.fixture
def hpcddp(tmp_path, monkeypatch, capsys):
    """Run it in this process."""
    for script in ("train.py", "x.py", "y.py", "a b"):  # render looks for what the command runs
        (tmp_path / script).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HPCDDP_SITE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return subprocess.CompletedProcess(words, main([*words]), *capsys.readouterr())

    return call


def test_stdout_is_the_script_and_stderr_says_which_site_and_why(run, tmp_path):
    (tmp_path / "train.py").touch()
    words = ["render", "--site", "local", "--name", "its", "--", "python", "train.py", "a b"]
    done = run(["hpcddp", *words], cwd=tmp_path, env={"HOME": str(tmp_path)})
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "\n#   hpcddp render --site local --name its -- python train.py 'a b'\n" in done.stdout
    assert done.stderr.splitlines()[0] == "hpcddp: site local (--site)"  # a Python without torch has a remark


def test_options_and_set_win_over_the_job_file_over_the_site(hpcddp, tmp_path):
    (tmp_path / "job.yaml").write_text(
        "site: abci3\naccount: a\nnodes: 2\nqueue: rt_HF\nname: n\ncommand: python x.py\n"
    )
    done = hpcddp("render", "job.yaml", "--set", "account=b", "--nodes", "4", "--", "python", "y.py")
    line = order_in(done.stdout).line
    assert (line.nodes, line.command) == (4, ("python", "y.py"))
    assert "#PBS -N n\n#PBS -P b\n" in done.stdout
    assert "site abci3 (site in job.yaml)" in done.stderr


def test_a_job_file_of_the_usual_name_is_taken_unasked(hpcddp, tmp_path):
    (tmp_path / "hpcddp.yaml").write_text("site: local\nranks_per_node: 3\ncommand: python x.py\n")
    assert order_in(hpcddp("render").stdout).line.world_size == 3


def test_a_site_may_come_from_set_and_from_a_file_of_ones_own(hpcddp, tmp_path, repo):
    assert "site local (--site)" in hpcddp("render", "--set", "site=local", "--", "true").stderr
    (tmp_path / "my.yaml").write_text((repo / "templates/sites/local.yaml").read_text())
    script = hpcddp("render", "--site", "./my.yaml", "--", "true").stdout
    assert order_in(script).site == "my"


@pytest.mark.parametrize(
    ("programs", "site", "reason"),
    [
        ({"qsub": "echo pbs_version = 23.06.06"}, "generic-pbs", "qsub is on PATH"),
        ({}, "local", "no scheduler's submit command is on PATH"),
    ],
)
def test_the_scheduler_on_path_chooses_the_site(hpcddp, programs, site, reason, tmp_path):
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{Path(sys.executable).parent}:{tmp_path}"  # not /usr/bin: this machine may have a scheduler
    options = [] if site == "local" else ["--gpus-per-node", "1", "--cpus-per-rank", "1", "--walltime", "1:00:00"]
    done = hpcddp("render", *options, "--", "true", PATH=path)
    assert order_in(done.stdout).site == site
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--site", "abcj"], 3),
        (["--site", "./missing.yaml"], 3),
        (["--site", "generic-slurm"], 3),
        (["--site", "abci3"], 2),
        (["--site", "local", "--set", "nodes"], 2),
        (["--site", "local", "--nodes", "-1"], 2),
        (["--frobnicate"], 2),
        (["."], 2),
    ],
)
def test_bad_input_is_two_lines_the_right_status_and_nothing_a_scheduler_takes(hpcddp, words, status):
    done = hpcddp("render", *words, "--", "python", "train.py")
    assert done.returncode == status
    message, hint = done.stderr.splitlines()
    assert message.startswith("hpcddp: ")
    assert hint.startswith("hint: ")
    assert done.stdout.startswith("#PBS hpcddp-render-failed\n")
    assert "#!" not in done.stdout


def test_sites_are_listed_and_shown(hpcddp):
    listed = hpcddp("sites").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["site", *site_files({})]
    assert listed[1].split()[:5] == ["abci3", "pbs", "8", "documented", "2026-01-30"]
    shown = hpcddp("sites", "show", "abci3").stdout
    assert "8 x H200, 192 hardware threads" in shown
    assert "https://docs.abci.ai/v3/en/job-execution/" in shown
    queue = json.loads(hpcddp("sites", "show", "abci3", "--json").stdout)["queues"]["rt_HF"]
    assert (queue["gpus"], queue["limits"][0]["walltime_s"]) == (8, 168 * 3600)
    assert hpcddp("sites", "show", "abci").returncode == 3
    assert hpcddp("sites", "frob").returncode == 2
