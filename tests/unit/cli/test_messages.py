"""What is said to a mistake at the command line: what is so, and something to type."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from hpcddp.cli.main import main
from hpcddp.cli.request import each_table
from hpcddp.script.site_file import site_files
from hpcddp.script.spec import KEYS


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Status, first line and hint of a command line in an empty folder with a train.py; without the site's remark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCDDP_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "train.py").write_text("print('trained')\n")

    def type_in(line: str) -> tuple[int, str, str]:
        status = main(shlex.split(line))
        *_, message, hint = capsys.readouterr().err.splitlines()
        return status, message.removeprefix("hpcddp: "), hint.removeprefix("hint: ")

    return type_in


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("rendr", "'rendr' is not a verb of hpcddp (did you mean 'render'?)", "hpcddp --help"),
        ("--nodes 2 render", "'--nodes' stands before the verb", "hpcddp render --nodes …, or hpcddp --help"),
        ("render train.py", "train.py is a script, not a job file", "put -- before it: -- python train.py"),
        (
            "render --site local python train.py --epochs",
            "hpcddp render: there is no -- before the command python train.py --epochs",
            "put it there: -- python train.py --epochs",
        ),
        (
            "launch --nodes 2 -- python train.py",
            "hpcddp launch has no option --nodes: nodes, queue and account are the allocation's",
            "leave out --nodes",
        ),
        ("env --from train.py", "train.py holds no variable",
         "record it in another file: env -0 > train.py.new"),
        ("env --jsno", "hpcddp env has no option --jsno (did you mean '--json'?)", "hpcddp env --help"),
        ("sites show", "hpcddp sites show needs a site's name", "hpcddp sites show NAME"),
        ("sites abci3", "hpcddp sites 'abci3' is not known", "hpcddp sites with one of show, page, check, new"),
        ("status runs/none", "there is no run 'runs/none' in runs/", "cd to the folder that has its runs/"),
        ("render --set mem_gb=x -- python train.py", "--set mem_gb 'x' is not a whole number of 1 or more",
         "--set mem_gb=4"),
        ("render --set exclusive=yes -- python train.py", "--set exclusive 'yes' is not known", "one of true, false"),
        ("render --walltime 10:00 -- python train.py",
         "--walltime '10:00' is not a duration with one meaning",
         "write it as 1:30:00 (hours:minutes:seconds), 90m, 1h30m or 2-00:00:00"),
        ("render --nodes 99999999999999999999 -- python train.py",
         "--nodes '99999999999999999999' is not a whole number of 1 or more", "--nodes 4"),
        ("launch --here --set gpus_per_node=0 -- true",
         "--set gpus_per_node: hpcddp launch takes ranks, max_micro_batch, independent, preflight, notify,"
         " max_restarts, min_nodes, spares, stall_limit or env.NAME",
         "leave it out, or use an option of its own: hpcddp launch --help"),
        ("exec -- ''", "the command begins with an empty word, ''", "hpcddp exec -- python train.py"),
        ("render --site local -- export A=1",
         "the command begins with 'export', which is no program, and no shell reads it",
         "-- bash -c '…' for a shell's line; env: and modules: of the job file go before it"),
        ("render --site local -- 'python train.py'",
         "the command is one word, 'python train.py': its blanks are quoted", "-- python train.py"),
        ("render --set nodes 4 -- python train.py", "--set 'nodes' has no value", "--set nodes=VALUE"),
        ("render --nodes '' -- true", "the word after `hpcddp render --nodes` is empty", "hpcddp render --help"),
        ("render --set venv= -- python train.py", "--set venv has no value", "--set venv=VALUE, or leave it out"),
        ("lint", "hpcddp lint: the following arguments are required: FILE", "hpcddp lint --help"),
        ("train --exact integr", "--exact 'integr' is not known (did you mean 'integer'?)",
         "--exact with one of tree, integer"),
        ("render --demo -- python train.py", "--demo brings its own job file and command, but 'python' was given",
         "leave out one"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_type(typed, line, message, hint):
    assert typed(line) == (2, message, hint)


MEANT = {
    "--partition x": ("--queue", "--queue x"),
    "--project x": ("--account", "--account x"),
    "--time 1:00:00": ("--walltime", "--walltime 1:00:00"),
    "--ntasks 8": ("--nodes", "--nodes N --ranks-per-node R"),
    "--ntasks-per-node 8": ("--ranks-per-node", "--ranks-per-node 8"),
    "-N 2": ("--nodes", "--nodes 2, or --name 2"),
    "--array 1-10": ("--set", "--set array=1-10"),
}


@pytest.mark.parametrize("words", MEANT)
def test_an_option_of_a_scheduler_is_answered_with_the_one_that_means_it(words, typed):
    name, hint = MEANT[words]
    option = words.partition(" ")[0].partition("=")[0]
    called = "a key of the job file" if name == "--set" else f"called {name}"
    status, message, told = typed(f"render {words} -- python train.py")
    assert (status, message) == (2, f"hpcddp render has no option {option}; it is {called} here")
    # where an option means several things, each has the titles of those who mean it; other rows may join them
    assert {line.partition(" (")[0] for line in hint.split(", or ")} <= {
        line.partition(" (")[0] for line in told.split(", or ")
    }


def test_each_option_that_is_meant_is_one():
    options = import_module("hpcddp.cli.render").build_parser()._option_string_actions
    tables = [typed for _, typed in each_table()]
    assert not {option for typed in tables for option in typed} & set(options)
    for typable in (typable for typed in tables for typable in typed.values()):
        assert {word for word in typable.split() if word.startswith("--")} <= set(options)
        for key in re.findall(r"--set (\w+)=", typable):
            assert key in KEYS


def test_a_nul_character_of_a_job_file_is_refused_and_none_is_printed(typed, tmp_path, capsys):
    (tmp_path / "hpcddp.yaml").write_text('site: local\ncommand: [true, "a\\0b"]\n')
    assert main(["render"]) == 2
    assert capsys.readouterr().err.startswith("hpcddp: command in hpcddp.yaml 'a\\x00b' holds a NUL")


def test_options_stand_over_set_and_that_over_the_job_file(typed, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("site: local\nnodes: 2\nranks_per_node: 3\n")
    words = "--nodes 1 --set nodes=3 --set env.A=1 --set env.B=2 --set ranks_per_node=2 -- python train.py"
    assert main(["layout", "job.yaml", *words.split()]) == 0
    assert "1 x 2 = 2 ranks" in capsys.readouterr().out


def test_no_control_character_reaches_a_terminal(typed, capsys):
    assert main(["status", "a\x1b[31m\x07b"]) == 2
    assert capsys.readouterr().err.startswith("hpcddp: there is no run 'a\\x1b[31m\\x07b' in runs/\n")


def test_a_list_and_variables_are_emptied_by_set(typed, tmp_path, capsys):
    (tmp_path / "hpcddp.yaml").write_text("site: local\nmodules: [cuda]\nenv: {A: b}\ncommand: python train.py\n")
    assert main(["render"]) == 0
    filled = capsys.readouterr().out
    assert main(["render", "--set", "modules=", "--set", "env="]) == 0
    emptied = capsys.readouterr().out
    assert "module load cuda" in filled
    assert "A=b" in filled
    assert "module load cuda" not in emptied
    assert "A=b" not in emptied


def test_version_has_a_short_form(capsys):
    assert main(["-V"]) == main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


EVERYTHING = {
    "generic-pbs": "--gpus-per-node 4 --cpus-per-rank 8 --walltime 1:00:00 -- python train.py",
    "abci3": "--account NAME -- python train.py",
}


@pytest.mark.parametrize("site", site_files({}))
def test_the_hint_of_a_request_for_nothing_can_be_typed_on_every_site(site, typed, capsys):
    status, message, hint = typed(f"render --site {site}")
    if message == "the request has no command":
        hint = "-- python train.py"
    assert status in {2, 3}
    assert main(["render", "--site", site, *hint.split()]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("site", EVERYTHING)
def test_all_that_is_missing_is_said_at_once_and_the_hint_can_be_typed(site, typed, capsys):
    status, message, hint = typed(f"render --site {site}")
    assert status in {2, 3}
    assert hint == EVERYTHING[site]
    assert "still needs" in message
    assert main(["render", "--site", site, *hint.split()]) == 0, capsys.readouterr().err


def test_a_request_without_a_command_is_refused_unless_demo_or_the_job_file_says_it(typed, tmp_path, capsys):
    assert typed("render --site local")[:2] == (2, "the request has no command")
    assert main(["render", "--site", "local", "--demo"]) == 0
    assert "hpcddp train --epochs 5" in capsys.readouterr().out
    (tmp_path / "job.yaml").write_text("command: python train.py\n")
    assert main(["render", "--site", "local", "job.yaml"]) == 0


def test_the_trainer_without_torch_says_what_is_missing_and_how_it_comes():
    program = "import sys; sys.modules['torch'] = None; from hpcddp.cli.main import main; sys.exit(main(['train']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    message, hint = done.stderr.splitlines()
    assert message == f"hpcddp: hpcddp train needs torch, which {sys.executable} does not have"
    assert hint == "hint: pip install 'hpcddp[train,demo]'"
