"""What render finds before a job is queued: clearly wrong is refused, perhaps wrong is told."""

from __future__ import annotations

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.preflight import Here, check_output, check_plan

from .conftest import ORIGIN, plan, script

THERE = {
    "/sub",
    "/sub/train.py",
    "/sub/src",
    "/opt/env/bin/python",
    "/opt",
    "/home/alice",
    "/sub/logs",
    "/home/alice/w",
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
        ({"venv": "/home/alice/env"}, "venv '/home/alice/env' does not exist, though /home/alice does"),
        ({"command": ["env", "A=1", "torchrun", "train.py"]}, "starts its own ranks with torchrun"),
        ({"command": ["numactl", "-l", "accelerate", "launch", "train.py"]}, "starts its own ranks with accelerate"),
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
        ({"env": {"OMP_NUM_THREADS": "64"}}, "more than the 8 cores"),
    ],
)
def test_what_the_compute_nodes_may_have_is_told(asked, words):
    assert words in " ".join(check(**asked))


def test_more_ranks_than_this_machine_has_cpus_are_told():
    assert check("local", ranks_per_node="7") == [f"7 ranks share this machine's {ORIGIN.cpus} CPUs"]
    assert check("local", ranks_per_node="6") == []


def test_commands_whose_files_are_not_seen_are_left_alone():
    for command in (
        ["python", "-m", "pkg"],
        ["python", "-c", "pass"],
        ["true"],
        ["python", "-W", "ignore", "train.py"],
    ):
        assert check(command=command) == []


@pytest.mark.parametrize(
    ("directive", "folder"),
    [
        ("#PBS -o log/out", "log"),
        ("#PBS -e log/", "log"),
        ("#SBATCH --output=log/%j.out", "log"),
        ("#$ -o log/x", "log"),
    ],
)
def test_the_outputs_folder_must_be_there(directive, folder):
    with pytest.raises(RequestError, match="folder log does not exist") as error:
        check_output(f"#!/bin/bash\n{directive}\necho\n", HERE)
    assert error.value.hint == f"mkdir -p {folder}"
    assert check_output(f"#!/bin/bash\n{directive.replace('log', 'logs')}\n", HERE) == []
    assert check_output(f"#!/bin/bash\necho\n{directive}\n", HERE) == []
    assert check_output(f"#!/bin/bash\n{directive.replace('log', '/groups/g/log')}\n", HERE)


@pytest.mark.parametrize("site", ["generic-pbs", "generic-slurm", "local"])
def test_the_scripts_own_output_needs_no_folder(site):
    assert check_output(script(site), HERE) == []


def test_render_checks_unless_told_not_to(run, tmp_path):
    def render(*words: str):
        return run(["hpcddp", "render", "--site", "local", *words], cwd=tmp_path, env={"HOME": str(tmp_path)})

    for option in ([], ["--check"]):
        done = render(*option, "--", "python", "missing.py")
        assert (done.returncode, done.stdout.splitlines()[0]) == (2, "#PBS hpcddp-render-failed")
        assert len(done.stderr.splitlines()) == 3  # the site; what is so; the hint
        assert "--no-check" in done.stderr
    assert render("--no-check", "--", "python", "missing.py").stdout.startswith("#!/bin/bash\n")
