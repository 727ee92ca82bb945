"""Rules for every verb, also for those that come later: help, examples, exit statuses, JSON, pipes, completion."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import subprocess

import pytest

from hpcddp.cli.main import main
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import no_job, refusal
from hpcddp.cli.verbs import EXITS, VERBS
from hpcddp.lint.script import read_script

# Verbs without --json, and why.
SHOWS_NOTHING = {
    "render": "it prints a script",
    "exec": "it becomes the command",
    "init": "it writes a file and prints its name",
    "supervise": "job scripts call it",
    "launch": "it becomes the launcher",
    "submit": "it prints the job's id and nothing else",
    "logs": "it prints what the ranks have printed",
    "watch": "it draws on a terminal; status has the facts",
    "cancel": "what it does is said on stderr; status has the facts",
    "train": "what it finds out is in metrics.jsonl",
    "completion": "it prints a script for a shell",
}
NO_JOB, REFUSAL = no_job(), refusal()
FEW = 5  # options that need no groups


def parser_of(verb: str) -> VerbParser:
    return importlib.import_module(f"hpcddp.cli.{verb}").build_parser()


def help_of(verb: str, capsys) -> str:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(NO_JOB)  # on a pipe nobody takes it for a job: see below
    return out.removeprefix(NO_JOB)


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_usage_an_example_and_the_exit_statuses(verb, capsys):
    text = help_of(verb, capsys)
    assert text.startswith(f"usage: hpcddp {verb}")
    assert "\nexample:\n  " in text
    statuses = [int(n) for n in re.findall(r"^  (\d+) +\S", text.split("\nexit status:\n")[1], re.MULTILINE)]
    assert statuses[0] == 0
    assert statuses == sorted(statuses)
    assert 2 in statuses, "every verb can be asked for something wrong"
    assert all(EXITS[n] in text for n in statuses if n in {2, 3, 4, 5})


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_is_a_line_that_the_verb_takes(verb):
    lines = parser_of(verb).example.splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line.replace('"$(', "").replace(')"', ""))
        words = words[words.index("hpcddp") + 1 :]
        words = words[: min((words.index(end) for end in ("|", ">", "--") if end in words), default=len(words))]
        parser_of(words[0]).read_words(words[1:])


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_described_and_many_options_are_in_groups(verb):
    parser = parser_of(verb)
    options = [action for action in parser._actions if action.dest != "help"]
    for action in options:
        assert action.help, action.dest
    in_groups = [action for group in parser._action_groups[2:] for action in group._group_actions]
    named = [action for action in options if action.option_strings]
    if len(named) > FEW:
        assert {a.dest for a in named} == {a.dest for a in in_groups if a.option_strings}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_shows_something_shows_it_as_json_too(verb):
    assert ("--json" in parser_of(verb)._option_string_actions) != (verb in SHOWS_NOTHING)


@pytest.mark.parametrize("argv", [[], ["help"], ["help", "render"], ["rendr"]])
def test_help_and_what_is_no_verb_leave_no_job_on_a_pipe(argv, capsys):
    """qsub of PBS and of Grid Engine find an option that there is not, sbatch wants #!, and bash runs nothing."""
    with contextlib.suppress(SystemExit):
        main(argv)
    text = capsys.readouterr().out
    first, second, *_ = text.splitlines()
    assert first.startswith("#PBS hpcddp-")
    assert second.startswith("#$ -hpcddp-")
    done = subprocess.run(["bash", "-x"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert not [
        line for line in done.stderr.splitlines() if line.startswith("+") and line.split()[1] not in {"exit", "echo"}
    ]


@pytest.mark.parametrize("text", [NO_JOB, REFUSAL])
def test_the_parsers_of_directives_refuse_it_as_the_schedulers_do(text):
    assert read_script(text, None, lambda _: True).directives.refusals


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_option_is_refused_in_two_lines(verb, capsys):
    assert main([verb, "--frobnicate", "word", "word"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("hpcddp: ")
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if not parser_of(verb).takes_command])
def test_a_command_behind_dashes_is_refused_where_none_belongs(verb, capsys):
    one = {key: ["x"] for key in ("lint", "logs", "watch", "cancel", "diagnose", "stacks", "efficiency")}
    words = {**one, "compare": ["x", "y"], "completion": ["bash"]}.get(verb, [])
    assert main([verb, *words, "--", "python"]) == 2
    assert f"hpcddp {verb} takes no command after --, got 'python'" in capsys.readouterr().err
