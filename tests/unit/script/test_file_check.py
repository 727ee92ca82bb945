"""What render finds before a job is queued: clearly wrong is refused, perhaps wrong is told."""

from __future__ import annotations

import os

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.file_check import Here, check_output, check_plan

from .conftest import plan, script

THERE = {
    "/sub",
    "/sub/train.py",
    "/sub/src",
    "/opt/env/bin/python",
    "/opt",
    "/home/alice",
    "/sub/logs",
    "/home/alice/w",
    "/tmp",
}
HERE = Here("/sub", lambda path: path.rstrip("/") in THERE)


def check(site: str = "generic-slurm", **asked: object) -> list[str]:
    return check_plan(plan(site, **asked), HERE)


def test_a_request_whose_paths_are_there_is_not_talked_about():
    assert check(pythonpath=["src"], workdir="/sub") == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"command": ["python", "-u", "trian.py"]}, "'trian.py' is not in /sub"),
        ({"command": ["bash", "run.sh"]}, "'run.sh' is not in /sub"),
        ({"command": ["./run"]}, "'./run' is not in /sub"),
        ({"command": ["python", "/sub/x.py"]}, "'/sub/x.py' does not exist, though /sub does"),
        ({"pythonpath": ["lib"]}, "pythonpath 'lib' is not in /sub"),
        ({"workdir": "nowhere"}, "workdir 'nowhere' is not in /sub"),
        ({"workdir": "/home/alice/w"}, "'train.py' is not in /home/alice/w"),
        ({"run_dir": "~/runs"}, "run_dir '~/runs' has a word that only a shell would replace"),
        ({"stage_dir": "$TMPDIR/x", "stage_in": ["src"]}, r"stage_dir '\$TMPDIR/x' has a word"),
        ({"venv": "/home/alice/env"}, "venv '/home/alice/env' does not exist, though /home/alice does"),
    ],
)
def test_what_is_clearly_wrong_is_refused(asked, words):
    with pytest.raises(RequestError, match=words) as error:
        check(**asked)
    assert error.value.hint


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"command": ["python", "/groups/g/train.py"]}, "/groups/g/train.py is not on this machine"),
        ({"venv": "/groups/g/env"}, "venv /groups/g/env is not on this machine"),
        ({"workdir": "/groups/g/w"}, "workdir /groups/g/w is not on this machine"),
        ({"command": ["python", "/tmp/train.py"]}, "/tmp/train.py is not on this machine"),
        ({"command": ["bash", "-c", "torchrun train.py"]}, "shell line starts torchrun"),
    ],
)
def test_what_the_compute_nodes_may_have_is_told(asked, words):
    assert words in " ".join(check(**asked))


FILES = {
    "/sub/noexec.sh": b"#!/bin/sh\n",
    "/sub/plain": b"echo\n",
    "/sub/tool": b"#!/bin/sh\n",
    "/sub/train.py": b"import torch\n",
    "/usr/bin/bash": b"\x7fELF",
    "/opt/env/bin/accelerate": b"#!/opt/env/bin/python\n",
}
FOLDERS = {
    "/usr/bin": ["bash", "python3", "nsys"],
    "/opt/env/bin": ["python", "accelerate"],
}
EXECUTABLE = {"/sub/plain", "/sub/tool", "/usr/bin/bash", "/opt/env/bin/accelerate"}


def look(**asked: object) -> list[str]:
    """The remarks on a machine with these files."""
    here = Here(
        "/sub",
        lambda path: os.path.normpath(path) in THERE | set(FILES),
        lambda path: os.path.normpath(path) in EXECUTABLE,
        lambda path: FILES.get(os.path.normpath(path), b""),
        lambda folder: FOLDERS.get(folder, []),
        ("/usr/bin",),
    )
    return check_plan(plan("generic-slurm", **asked), here)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train.py"], "starts with train.py, which is no program on PATH\nhint: -- python train.py$"),
        (["run.sh"], "no program on PATH\nhint: -- bash run.sh$"),
        (["./noexec.sh"], "./noexec.sh is not executable\nhint: chmod \\+x ./noexec.sh, or -- bash ./noexec.sh$"),
        (["./plain"], "./plain has no #! line, so the system cannot start it"),
        (["/sub/train.py"], "/sub/train.py is not executable\nhint: chmod .*, or -- python /sub/train.py$"),
        (["tool"], "tool is in /sub, but not on PATH\nhint: -- ./tool$"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused(command, words):
    with pytest.raises(RequestError, match=words):
        look(command=command)


@pytest.mark.parametrize("command", [["./tool"], ["bash", "-c", "true"], ["accelerate"], ["/elsewhere/tool"]])
def test_a_program_that_can_be_started_is_not_talked_about(command):
    told = look(command=command)
    assert told == (["the command's script /elsewhere/tool is not on this machine; the compute nodes must have it"]
                    if "/elsewhere/tool" in command else [])  # fmt: skip


def test_a_program_that_only_the_nodes_may_have_is_told_with_what_is_near():
    assert look(command=["pyhton", "train.py"]) == [
        "pyhton is not on this machine's PATH (did you mean 'python'?); the compute nodes must have it"
    ]


def test_commands_whose_files_are_not_seen_are_left_alone():
    for command in (
        ["python", "-m", "pkg"],
        ["python", "-c", "pass"],
        ["true"],
        ["python", "-W", "ignore", "train.py"],
    ):
        assert check(command=command) == []


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
    def output(lines: str) -> list[str]:
        return list(check_output(scheduler, f"#!/bin/bash\n{lines}", HERE))

    with pytest.raises(RequestError, match="folder log does not exist") as error:
        output(f"{directive}\necho\n")
    assert error.value.hint == "mkdir -p log"
    assert output(f"{directive.replace('log', 'logs')}\n") == output(f"echo\n{directive}\n") == []
    assert output(f"{directive.replace('log', '/groups/g/log')}\n")
    with pytest.raises(RequestError, match="folder /sub/log does not exist"):
        output(f"{directive.replace('log', '/sub/log')}\n")
    assert output(f"{directive.replace('log', 'log^array_index^' if scheduler == 'pbs' else '%x')}\n") == []


@pytest.mark.parametrize("site", ["generic-pbs", "generic-slurm", "local"])
def test_the_scripts_own_output_needs_no_folder(site):
    assert list(check_output(site.removeprefix("generic-"), script(site), HERE)) == []


def test_render_checks_unless_told_not_to(run, tmp_path):
    def render(*words: str):
        return run(["hpcddp", "render", "--site", "local", *words], cwd=tmp_path, env={"HOME": str(tmp_path)})

    done = render("--", "python", "missing.py")
    assert (done.returncode, done.stdout.splitlines()[0]) == (2, "#PBS hpcddp-render-failed")
    assert len(done.stderr.splitlines()) == 3  # the site; what is so; the hint
    assert "--no-check" in done.stderr
    assert render("--no-check", "--", "python", "missing.py").stdout.startswith("#!/bin/bash\n")
