"""What every scheduler's row has to say. A scheduler that does not exist, but has all of its files, says it too."""

from __future__ import annotations

import re
import sys

import pytest

from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import SHARED, all_schedulers, find_scheduler, scheduler_names
from hpcddp.schedulers.row import CommandAnswer, Scheduler

from .moonshot import TEMPLATE, made_up


@pytest.mark.parametrize("name", scheduler_names())
def test_every_module_is_a_scheduler_of_its_name_that_can_be_loaded_alone(name, run):
    row = find_scheduler(name)
    assert row.name == name
    program = f"import sys, hpcddp.schedulers.{name}; print(*(n for n in sys.modules if n.startswith('hpcddp.sched')))"
    loaded = {module.rpartition(".")[2] for module in run([sys.executable, "-c", program]).stdout.split()}
    assert loaded - {"schedulers"} <= SHARED | {name}


@pytest.fixture(params=[*(row.name for row in all_schedulers()), "moonshot"])
def row_and_template(request, repo, tmp_path) -> tuple[Scheduler, str]:
    """Each scheduler with its template, "" for none: what the tests below ask of a row, the made-up one has as well."""
    if request.param == "moonshot":
        return made_up(tmp_path), TEMPLATE
    template = repo / f"templates/{request.param}.sh.j2"
    return find_scheduler(request.param), template.read_text() if template.exists() else ""


def test_a_scheduler_with_scripts_has_its_template_and_its_generic_site(row_and_template, repo):
    row, template = row_and_template
    site = repo / f"templates/sites/{row.generic_site}.yaml"
    assert (template != "") == bool(row.generic_site)
    assert not row.generic_site or site.exists() or row.name == "moonshot"


def test_a_row_that_takes_chains_says_how_the_next_attempt_is_queued(row_and_template):
    commands = row_and_template[0].commands
    assert bool(commands.follow) == ("chain" in row_and_template[0].directives.options)
    assert not commands.follow or (commands.follow[0], commands.follow[-1]) == (commands.submit[0], "{script}")


def test_a_row_names_the_variables_that_its_template_reads(row_and_template):
    row, template = row_and_template
    if not template:
        return
    said = row.variables
    told = () if row.this_machine else (said.job_id[0], said.folder)  # hpcddp submit sets a background job's id
    for name in filter(None, told):
        assert name in template
    for word in {w for option in row.directives.options.values() for w in option.split() if w.startswith("--")}:
        assert f"{row.directives.prefix} {word}" in template


def test_states_are_told_in_words_that_all_schedulers_share(row_and_template):
    row, _ = row_and_template
    words = {"queued", "held", "running", "suspended", "exiting", "finished", "failed", "cancelled", "moved"}
    assert set(row.states.values()) <= words
    assert not row.commands.submit or {"queued", "running"} <= set(row.states.values())


def test_every_scheduler_with_jobs_of_ours_can_be_asked_and_says_an_arrays_index(row_and_template):
    row, _ = row_and_template
    if row.commands.submit:
        assert "{}" in row.commands.state or {"{ids}", "{user}"} & {*row.commands.jobs}
        silent = CommandAnswer(1, "", "the server does not answer")
        assert row.commands.parse_job(parse_id("1"), silent, row.states, {}) is None
        assert row.variables.array_index


def test_the_states_that_pbs_was_seen_to_say_are_in_its_row(repo):
    texts = [path.read_text() for path in (repo / "tests/captures/pbs").glob("*.json")]
    said = {state for text in texts for state in re.findall(r"\bjob_state\W+([A-Z])\b", text)}
    assert {"B", "F", "H"} <= said
    assert said <= find_scheduler("pbs").states.keys()


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("slurm", "scancel: error: Kill job error on job id 12: Job/step already completing or completed"),
        ("pbs", "qdel: Unknown Job Id 353.pbs1"),
        ("pbs", "qdel: Job has finished 380.pbs1"),
        ("gridengine", 'denied: job "99" does not exist'),
    ],
)
def test_what_a_cancelling_command_says_of_a_job_that_is_over_is_in_its_row(scheduler, line):
    assert any(text in line for text in find_scheduler(scheduler).commands.over)
