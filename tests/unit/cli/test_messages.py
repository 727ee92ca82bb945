"""What is said to a mistake at the command line: what is so, and something to type."""

from __future__ import annotations

import os
import pty
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
        ("train.py", "there is no verb before 'train.py'", "hpcddp launch -- python train.py"),
        ("job.yaml", "there is no verb before 'job.yaml'", "hpcddp render job.yaml"),
        ("layout --set nodes=2 --nodes 1 -- true", "nodes is given twice: --set nodes=2 and --nodes 1",
         "leave out one of them"),
        ("--nodes 2 render", "'--nodes' stands before the verb", "hpcddp render --nodes …, or hpcddp --help"),
        ("render train.py", "train.py is a training script, not a job file", "put -- first: -- python train.py"),
        ("render run.sh", "run.sh is a shell script, not a job file", "put -- first: -- bash run.sh"),
        ("layout python", "python is a program, not a job file", "put -- first: -- python …"),
        (
            "render --site local python train.py --epochs",
            "hpcddp render: there is no -- before the command python train.py --epochs",
            "put it there: -- python train.py --epochs",
        ),
        (
            "launch python train.py",
            "hpcddp launch: there is no -- before the command python train.py",
            "put it there: -- python train.py",
        ),
        (
            "launch --nodes 2 -- python train.py",
            "hpcddp launch has no option --nodes: nodes, queue and account are the allocation's",
            "leave out --nodes",
        ),
        (
            "launch --ntasks=8 -- python train.py",
            "hpcddp launch has no option --ntasks: it is the ranks of each node here; nodes, queue and account are the"
            " allocation's",
            "--ranks-per-node 8",
        ),
        (
            "launch --here -n2 -- python train.py",
            "hpcddp launch has no option -n: it is the ranks of each node here; nodes, queue and account are the"
            " allocation's",
            "--ranks-per-node 2",
        ),
        ("env --from train.py", "train.py holds no variable",
         "record it in another file: env -0 > train.py.new"),
        ("env --jsno", "hpcddp env has no option --jsno (did you mean '--json'?)", "hpcddp env --help"),
        ("sites page", "hpcddp sites page needs a site's name", "hpcddp sites page NAME"),
        ("sites --file x", "--file goes with hpcddp sites new", "hpcddp sites new NAME --file x"),
        ("-V x", "hpcddp -V takes no further word, got 'x'", "hpcddp -V"),
        ("layout --no-check -- true", "hpcddp layout has no option --no-check: it is one of hpcddp render",
         "leave out --no-check"),
        ("render --site generic-slurm --gpus-per-node 1 --cpus-per-rank 8 --walltime 1h --set array=1-1000000000"
         " -- true", "array '1-1000000000' is not FIRST-LAST or FIRST-LAST:STEP",
         "--set array=0-9; for few at once: --set array_limit=2"),
        ("sites show", "hpcddp sites show needs a site's name", "hpcddp sites show NAME"),
        ("sites abci3", "hpcddp sites does not know 'abci3'", "hpcddp sites show abci3"),
        ("status runs/none", "there is no run 'runs/none' in runs/", "cd to the folder that has its runs/"),
        ("render --set mem_gb=x -- python train.py", "--set mem_gb 'x' is not a whole number of 1 or more",
         "--set mem_gb=512"),
        ("render --set exclusive=yes -- python train.py", "--set exclusive 'yes' is not known", "--set exclusive=true"),
        ("render --walltime 10:00 -- python train.py",
         "--walltime '10:00' is either minutes:seconds or hours:minutes", "--walltime 10m, or --walltime 10h"),
        ("render --nodes 99999999999999999999 -- python train.py", "--nodes '99999999999999999999' is too large",
         "--nodes 4"),
        ("launch --here --set gpus_per_node=0 -- true",
         "--set gpus_per_node: hpcddp launch takes ranks, max_micro_batch, independent, preflight, notify,"
         " max_restarts, min_nodes, spares, stall_limit or env.NAME",
         "leave it out, or use an option of its own: hpcddp launch --help"),
        ("exec -- ''", "the command begins with an empty word, ''", "hpcddp exec -- python train.py"),
        ("render --site local -- export A=1",
         "the command begins with 'export', which is no program, and no shell reads it",
         "-- bash -c '…' for a shell's line; env: and modules: of the job file go before it"),
        ("render --site local -- python", "the command is python, without a program for it", "-- python train.py"),
        ("render --site local -- bash", "the command is bash, without a script for it", "-- bash train.sh"),
        ("render --site local -- 'python train.py'",
         "the command is one word, 'python train.py': its blanks are quoted", "-- python train.py"),
        ("render --walltime 0 -- python train.py",
         "--walltime '0' has no unit: some schedulers take minutes, others seconds", "--walltime 1:30:00"),
        ("render --set nodes 4 -- python train.py", "--set 'nodes' has no value", "--set nodes=4"),
        ("render --set nodes -- python train.py", "--set 'nodes' has no value", "--set nodes=VALUE"),
        ("lint", "hpcddp lint: the following arguments are required: FILE",
         "hpcddp lint --site abci3 job.sh train.py"),
        ("sites --json=yes", "hpcddp sites: argument --json: ignored explicit argument 'yes'", "hpcddp sites --help"),
        ("launch --partition x -- python train.py",
         "hpcddp launch has no option --partition: nodes, queue and account are the allocation's",
         "leave out --partition"),
        ("train --exact integr", "--exact 'integr' is not known", "--exact integer"),
        ("python train.py --lr 1", "there is no verb before 'python'", "hpcddp launch -- python train.py --lr 1"),
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
    "--exclusive": ("--set", "--set exclusive=true"),
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


EMPTY = {
    "render --site ''": ("--site", "S"),
    "render --nodes '' -- python train.py": ("--nodes", "N"),
    "launch --resume '' -- python train.py": ("--resume", "RUN"),
    "env --from ''": ("--from", "FILE"),
}


@pytest.mark.parametrize("line", EMPTY)
def test_an_option_with_an_empty_value_is_refused_as_an_unset_variable_gives_it(line, typed):
    option, metavar = EMPTY[line]
    message = f"{option} has no value: the word after it is empty"
    assert typed(line) == (2, message, f"{option} {metavar}, or leave out {option}")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("render ''", "hpcddp render: JOB.yaml is an empty word",
         "hpcddp render --site abci3 --account GROUP --nodes 4 --walltime 2h -- python train.py | qsub"),
        ("compare runs/one ''", "hpcddp compare: RUN is an empty word", "hpcddp compare runs/one runs/two"),
        ("render --set nodes= -- python train.py", "--set nodes has no value", "--set nodes=VALUE, or leave it out"),
        ("render --set venv= -- python train.py", "--set venv has no value", "--set venv=VALUE, or leave it out"),
        ("render --set nods= -- python train.py", "unknown key 'nods' (--set nods) (did you mean 'nodes'?)", None),
    ],
)  # fmt: skip
def test_an_empty_word_for_a_file_or_a_key_is_refused(line, message, hint, typed):
    status, said, typable = typed(line)
    assert (status, said) == (2, message)
    assert hint in (typable, None)


@pytest.mark.parametrize("key", ["site", "nodes", "walltime", "global_batch", "name", "fresh"])
def test_a_key_that_a_job_file_leaves_empty_is_refused_as_an_unset_variable_gives_it(key, typed, tmp_path):
    (tmp_path / "hpcddp.yaml").write_text(f"command: python train.py\n{key}:\n")
    message, hint = f"{key} in hpcddp.yaml has no value", f"{key}: VALUE, or leave it out"
    assert typed("render") == typed("layout") == (2, message, hint)


@pytest.mark.parametrize("line", ['command: [true, "a\\0b"]', 'env: {A: "a\\0b"}'])
def test_a_nul_character_of_a_job_file_is_refused_and_none_is_printed(line, typed, tmp_path, capsys):
    (tmp_path / "hpcddp.yaml").write_text(f"site: local\n{line}\n")
    assert main(["render"]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"hpcddp: {line.partition(':')[0]} in hpcddp.yaml 'a\\x00b' holds a NUL")
    assert hint == "hint: leave the character out"


def test_options_stand_over_the_job_file_and_may_repeat_themselves(typed, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("site: local\nnodes: 2\nranks_per_node: 3\n")
    words = "--nodes 1 --nodes=1 --set nodes=1 --set env.A=1 --set env.B=2 --set ranks_per_node=2 -- python train.py"
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


@pytest.mark.parametrize(
    "command", ["python -V", "python -c pass", "python -m train", "bash -c true", "bash -l train.sh"]
)
def test_an_interpreter_that_has_something_to_do_is_a_command(command, typed):
    assert main(["render", "--site", "local", "--no-check", "--", *command.split()]) == 0


def test_an_option_may_stand_between_the_words_of_sites(typed, capsys):
    printed = [(main(["sites", *words.split()]), capsys.readouterr().out) for words in
               ("--json show abci3", "show --json abci3", "show abci3 --json")]  # fmt: skip
    assert printed[0][0] == 0
    assert printed == [printed[0]] * 3


def test_version_has_a_short_form(capsys):
    assert main(["-V"]) == main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


COLOURED = "\x1b[1mhpcddp:\x1b[0m"


@pytest.mark.parametrize(
    ("more", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_has_colour_unless_no_color_is_set(more, coloured):
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "TERM"}}
    subprocess.run([sys.executable, "-m", "hpcddp", "rendr"], stderr=theirs, stdout=subprocess.DEVNULL,
                   env=env | {"TERM": "xterm"} | more, check=False)  # fmt: skip
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "'rendr' is not a verb" in said
    assert (COLOURED in said) == coloured == ("\x1b" in said)


def test_what_is_not_a_terminal_has_none():
    said = subprocess.run([sys.executable, "-m", "hpcddp", "rendr"], capture_output=True, check=False)
    assert b"\x1b" not in said.stdout + said.stderr


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
