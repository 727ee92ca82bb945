"""What render finds before a job is queued: clearly wrong is refused, perhaps wrong is told."""

from __future__ import annotations

import os

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.file_check import check_output, check_plan

from .conftest import PLANNED_BY, plan, script

ELSEWHERE = "/nonexistent/g"  # a file system of the compute nodes
FILES = {
    "train.py": "import torch\n",
    "noexec.sh": "#!/bin/sh\n",
    "tool": "#!/bin/sh\n",
    "bin/python": "#!/bin/sh\n",
    "bin/accelerate": "#!/usr/bin/python\n",
    "src/package.py": "",
    "logs/old": "",
    "w/other.py": "",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder that the job is submitted from; the ranks' Python is bin/python."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644 if name in {"noexec.sh", "train.py"} else 0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(path: str = "", **asked: object) -> list[str]:
    if "venv" not in asked:
        asked["python"] = f"{os.getcwd()}/bin/python"
    return check_plan(plan("generic-slurm", PLANNED_BY, **asked), path)


def test_a_request_whose_paths_are_there_is_not_talked_about(here):
    assert check(pythonpath=["src"], workdir=str(here)) == []
    for command in (
        ["python", "-m", "pkg"],
        ["python", "-c", "pass"],
        ["python", "-um", "pkg"],
        ["bash", "-lc", "echo hi"],
        ["python", "-", "an argument"],
        ["true"],
        ["python", "-W", "ignore", "train.py"],
    ):
        assert check(command=command) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"command": ["python", "-u", "trian.py"]}, "'trian.py' is not in "),
        ({"command": ["bash", "run.sh"]}, "'run.sh' is not in "),
        ({"command": ["./run"]}, "'./run' is not in "),
        ({"command": ["python", "/usr/x.py"]}, "'/usr/x.py' does not exist, though /usr does"),
        ({"pythonpath": ["lib"]}, "pythonpath 'lib' is not in "),
        ({"workdir": "nowhere"}, "workdir 'nowhere' is not in "),
        ({"workdir": "w"}, "'train.py' is not in .*/w"),
        ({"run_dir": "~/runs"}, "run_dir '~/runs' has a word that only a shell would replace"),
        ({"stage_dir": "$TMPDIR/x", "stage_in": ["src"]}, r"stage_dir '\$TMPDIR/x' has a word"),
        ({"venv": "/usr/env"}, "venv '/usr/env' does not exist, though /usr does"),
    ],
)
def test_what_is_clearly_wrong_is_refused(asked, words):
    with pytest.raises(RequestError, match=words) as error:
        check(**asked)
    assert error.value.hint


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"command": ["python", f"{ELSEWHERE}/train.py"]}, f"{ELSEWHERE}/train.py is not on this machine"),
        ({"venv": f"{ELSEWHERE}/env"}, f"venv {ELSEWHERE}/env is not on this machine"),
        ({"workdir": f"{ELSEWHERE}/w"}, f"workdir {ELSEWHERE}/w is not on this machine"),
        ({"command": ["python", "/tmp/no such.py"]}, "/tmp/no such.py is not on this machine"),
        ({"command": ["bash", "-c", "torchrun train.py"]}, "shell line starts torchrun"),
    ],
)
def test_what_the_compute_nodes_may_have_is_told(asked, words):
    assert words in " ".join(check(**asked))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train.py"], "starts with train.py, which is no program on PATH\nhint: -- python train.py$"),
        (["./noexec.sh"], "./noexec.sh is not executable\nhint: chmod \\+x ./noexec.sh$"),
        (["bash train.sh"], "one word, 'bash train.sh': its blanks are quoted\nhint: -- bash train.sh$"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused(command, words):
    with pytest.raises(RequestError, match=words):
        check("/usr/bin:/bin", command=command)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["./tool"], []),
        (["bash", "-c", "true"], []),
        (["accelerate"], []),
        ([f"{ELSEWHERE}/tool"], [f"the command's script {ELSEWHERE}/tool is not on this machine"]),
        (["accelerat", "x"], ["accelerat is not on this machine's PATH"]),
    ],
)
def test_a_program_that_can_be_started_is_not_talked_about_and_one_that_the_nodes_may_have_is(command, told):
    assert check("/usr/bin:/bin", command=command) == [f"{one}; the compute nodes must have it" for one in told]


@pytest.mark.parametrize(
    ("scheduler", "directive"),
    [
        ("pbs", "#PBS -o log/out"),
        ("pbs", "#PBS -e log/"),
        ("slurm", "#SBATCH --output=log/%j.out"),
        ("gridengine", "#$ -o log/x"),
    ],
)
def test_the_outputs_folder_must_be_there(scheduler, directive):
    def output(folder: str, before: str = "") -> list[str]:
        return list(check_output(scheduler, f"#!/bin/bash\n{before}{directive.replace('log', folder)}\necho\n"))

    with pytest.raises(RequestError, match="folder log does not exist") as error:
        output("log")
    assert error.value.hint == "mkdir -p log"
    with pytest.raises(RequestError, match="folder /usr/log does not exist"):
        output("/usr/log")
    assert output("logs") == output("log", before="echo\n") == []
    assert output("log^array_index^" if scheduler == "pbs" else "%x") == []
    assert output(f"{ELSEWHERE}/log")


@pytest.mark.parametrize("site", ["generic-pbs", "generic-slurm", "local"])
def test_the_scripts_own_output_needs_no_folder(site):
    assert list(check_output(site.removeprefix("generic-"), script(site))) == []


def test_render_checks_unless_told_not_to(run, tmp_path):
    def render(*words: str):
        return run(["hpcddp", "render", "--site", "local", *words], cwd=tmp_path, env={"HOME": str(tmp_path)})

    done = render("--", "python", "missing.py")
    assert (done.returncode, done.stdout.splitlines()[0]) == (2, "#PBS hpcddp-render-failed")
    assert len(done.stderr.splitlines()) == 3  # the site; what is so; the hint
    assert "--no-check" in done.stderr
    assert render("--no-check", "--", "python", "missing.py").stdout.startswith("#!/bin/bash\n")
