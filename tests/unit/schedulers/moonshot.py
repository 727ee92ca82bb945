"""A scheduler that does not exist: its three files, and a checkout that has them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from hpcddp.schedulers.row import Scheduler

MODULE = '''"""Moonshot, which does not exist."""

from __future__ import annotations

from hpcddp.schedulers.row import Commands, Directives, JobFound, QueueFound, Scheduler, Variables


def parse_job(job, answer, states, env):
    word = "gone" if "no such flight" in answer.stderr else states.get(answer.stdout.strip())
    return JobFound(job, word) if word else None


def parse_queues(text):
    return [QueueFound(name, int(nodes)) for name, nodes in map(str.split, text.splitlines())]


SCHEDULER = Scheduler(
    name="moonshot",
    title="Moonshot",
    generic_site="generic-moonshot",
    directives=Directives(
        prefix="#MOON",
        refused="#MOON {}",
        options={
            "output": "--out", "array": "--each", "chain": "--after", "dependency": "--after", "mail": "--tell",
            "signal": "--warn",
        },
        typed={"--payer": "--account", "-N": "--queue"},
        account="--payer",
        site_words={"account": ("--payer", "--sponsor"), "size": ("orbits",)},
        printed=("--name", "--nodes", "--time", "--payer"),
        outputs=("--out",),
        mail={"begin": "launch", "end": "landing", "fail": "crash"},
        mail_separator="+",
        name_limits={"": 9},
    ),
    variables=Variables(
        prefixes=("MOON_",), job_id=("MOON_JOB",), nodefile="MOON_HOSTS", hostfile="MOON_HOSTS", cpus="MOON_CPUS",
        end="MOON_LANDING", array_index=("MOON_CRATER",), restarts="MOON_RELAUNCH", folder="MOON_PAD",
    ),
    commands=Commands(
        submit=("msub",),
        cancel=("mdel",),
        follow=("msub", "--after={job}", "{script}"),
        state=("mstat", "{}"),
        parse_job=parse_job,
        survey=(("mqueues",),),
        parse_survey=parse_queues,
        site_lines=("env: {MOON_PHASE: full}",),
    ),
    states={"waiting": "queued", "aloft": "running", "landed": "finished"},
)
'''

TEMPLATE = """\
{% extends "base.sh.j2" %}
{% block directives %}
#MOON --name={{ job.job_name }}
#MOON --{% if job.site.size == "orbits" %}orbits{% else %}nodes{% endif %}={{ job.nodes }}:{{ job.processes_per_node }}
#MOON --time={{ job.walltime }}
{% if job.account %}
#MOON {{ job.account_option }}={{ job.account }}
{% endif %}
{% if job.options.output %}
#MOON --out={{ job.options.output }}
{% endif %}
{% if job.options.mail %}
#MOON --tell={{ job.options.mail }}
{% endif %}
{% if job.options.array %}
#MOON --each={{ job.options.array }}
{% endif %}
{% if job.options.dependency %}
#MOON --after={{ job.options.dependency }}
{% endif %}
{% if job.options.signal_s and not job.warns_s %}
#MOON --warn={{ job.options.signal_s }}
{% endif %}
{% for directive in job.directives %}
#MOON {{ directive }}
{% endfor %}
{% endblock %}
{% block folder %}
cd "${MOON_PAD:-.}" || exit
{% endblock %}
{% block first_host %}
read -r MASTER_ADDR _ < "$MOON_HOSTS"
{% endblock %}
{% block job_number %}
job_number=$MOON_JOB
{% endblock %}
"""

SITE = """\
# https://moon.example.org/
schema: 1
summary: any Moonshot; options say what a node has
scheduler: moonshot
standing: generic
verified: 2026-11-21
launcher: {name: openmpi}
"""
ASKED = ["--site", "generic-moonshot", "--gpus-per-node", "4", "--cpus-per-rank", "8", "--walltime", "1:00:00"]


def checkout(repo: Path, folder: Path, module: str) -> Path:
    """A copy of the checkout with the three files of the new scheduler, and nothing else changed."""
    for name in ("hpcddp", "templates", "jobs"):
        shutil.copytree(repo / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (
        ("hpcddp/schedulers/moonshot.py", module),
        ("templates/moonshot.sh.j2", TEMPLATE),
        ("templates/sites/generic-moonshot.yaml", SITE),
    ):
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def write_program(folder: Path, name: str, body: str) -> Path:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return folder


def made_up(folder: Path) -> Scheduler:
    """The row of the scheduler that does not exist."""
    (folder / "moonshot.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("moonshot", folder / "moonshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row: Scheduler = module.SCHEDULER
    return row
