"""Nothing that a user writes becomes code, or a directive: whatever the text, it stays the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.runs.command import check_run_name, name_command, nearest_name
from hpcddp.script.scheduler_options import job_name
from hpcddp.script.spec import quote_word

from .conftest import ENOUGH, StubbedNode, plan, script

SITES = [site for site in ENOUGH if site != "abci3"]  # its modules are not on this machine
NASTY = ["a b", "it's", '"', "$(touch PWNED)", "`touch PWNED`", "; touch PWNED", "&& false", "!!", "~", "*", "-n", ""]
NASTY += ["l1\nl2", "a\tb", "\r", "\x7f\x01", "#", "\\", "x\\", "é日本", "\n#PBS -q x", "\n#SBATCH -p x"]
NASTY += ["HPCDDP_PLAN", "\nHPCDDP_PLAN\n", "{{ job }}", "{% raw %}"]
carried = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
texts = st.one_of(st.sampled_from(NASTY), carried, st.lists(st.sampled_from(NASTY)).map("".join))
quickly = settings(
    max_examples=settings.default.max_examples * 2 // 5,  # of 50, or of 1000 in `make test-all`
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)


# Those of the other sites differ in their directives: test_directives_stay.py.
SHORT = {"generic-slurm", "generic-gridengine"}
arguments_that_arrive = texts.filter(lambda text: text != ":")  # launchers begin another program with that
many = st.lists(arguments_that_arrive, min_size=20, max_size=60)  # since each job is a second of its own


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=[] if site in SHORT else pytest.mark.slow) for site in SITES]
)
@settings(quickly, max_examples=settings.default.max_examples // 10)
@given(arguments=many, value=texts)
def test_arguments_and_variables_reach_the_program_byte_for_byte(site, node: StubbedNode, arguments, value):
    text = script(site, node.planned_by, command=["prog", *arguments], env={"ODD": value}, name="odd")
    done = node.run(text)
    assert done.returncode == 0, done.stderr
    assert node.arguments == ["prog", *arguments]
    assert node.environment["ODD"] == value
    assert not list(node.folder.rglob("PWNED"))


@quickly
@given(texts)
def test_the_name_nearest_to_a_text_is_taken_as_it_is_by_the_run_and_every_scheduler(text):
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]{0,229}", job_name(nearest_name(text), 230))
    assert check_run_name(nearest_name(text), "--name") == nearest_name(text)


@quickly
@given(st.lists(texts))
def test_the_name_of_any_command_is_one_that_every_scheduler_takes(words):
    name = name_command(words)
    assert job_name(name, 230) == check_run_name(name, "--name") == name


@pytest.mark.parametrize("text", ["nul\0", "\udcff"])
def test_what_no_argument_can_carry_is_refused(text):
    with pytest.raises(RequestError, match="no program argument can carry"):
        quote_word(text)


@pytest.mark.parametrize("key", ["queue", "account"])
@quickly
@given(text=texts.filter(lambda t: t and not re.fullmatch(r"\w[A-Za-z0-9_.+:,@=%-]*", t, re.ASCII)))
def test_queue_and_account_are_one_plain_word_or_refused(key, text):
    for site in ("generic-pbs", "generic-slurm"):
        with pytest.raises(RequestError):
            plan(site, **{key: text})


@pytest.mark.parametrize(
    "directive",
    [
        "",
        "x",
        "-l select=9",
        "-N other",
        "-v A=1 -q x",
        "-v A='b'",
        "-W a # c",
        "-l a\\",
        "-l a\n#PBS -q x",
        "- a",
        "é",
    ],
)
def test_a_raw_directive_is_one_option_that_the_script_does_not_print_itself(directive):
    with pytest.raises(RequestError):
        plan("generic-pbs", directives=[directive])
