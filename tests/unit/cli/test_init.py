"""`hpcddp init` asks for what neither an option nor the machine says, and writes a job file that works as it stands."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hpcddp.cli.main import main
from tests.conftest import REPO


class Said(NamedTuple):
    status: int
    out: str
    err: str


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run it with these options, and these answers on a terminal (None: there is none)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "")
    for name in ("HPCDDP_SITE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def run(*options: str, answers: str | None = None) -> Said:
        monkeypatch.setattr(sys, "stdin", io.StringIO() if answers is None else Terminal(answers))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: answers is not None, raising=False)
        status = main(["init", *options])
        out, err = capsys.readouterr()
        return Said(status, out, err)

    return run


def test_what_options_say_is_written_and_the_users_own_line_works_from_then_on(init, tmp_path, capsys) -> None:
    said = init("--site", "abci3", "--account", "gaa50000", "--", "python", "train.py", "--lr", "0.1")
    assert (said.status, said.out) == (0, "hpcddp.yaml\n")
    assert "hpcddp render --nodes 4 | qsub" in said.err
    assert yaml.safe_load((tmp_path / "hpcddp.yaml").read_text()) == {
        "site": "abci3",
        "account": "gaa50000",
        "command": "python train.py --lr 0.1",
    }
    assert main(["render", "--nodes", "4", "--no-check"]) == 0
    assert "#PBS -l select=4:mpiprocs=8:ompthreads=12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ("abci3\n\ngaa50000\n", {"site": "abci3", "account": "gaa50000", "command": "python train.py"}),
        ("generic-slurm\n\n\n", None),
    ],
)
def test_three_questions_are_asked_and_no_more(init, tmp_path, answers, wanted) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    said = init(answers=answers)
    if wanted is None:  # what else a bare site leaves open is said, to be typed as options
        assert (said.status, "hint: --gpus-per-node 4 --cpus-per-rank 8 --walltime 1:00:00" in said.err) == (3, True)
        return
    assert said.status == 0, said.err
    written = yaml.safe_load((tmp_path / "hpcddp.yaml").read_text())
    assert {key: written.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "answers", "status", "said"),
    [
        (["--site", "abci3", "--", "python", "x.py"], None, 2, "a job on site abci3 still needs an account"),
        (["--site", "nowhere"], None, 3, "site 'nowhere' is not known"),
        ([], "abci3\n", 2, "there was no answer to: the command that trains"),
        (["job.yaml"], None, 2, "hpcddp init writes hpcddp.yaml, and got job.yaml"),
    ],
)
def test_nothing_is_written_of_a_request_that_is_not_whole(init, tmp_path, options, answers, status, said) -> None:
    result = init(*options, answers=answers)
    assert (result.status, result.out) == (status, "")
    assert said in result.err
    assert "hint: " in result.err
    assert not (tmp_path / "hpcddp.yaml").exists()


@pytest.mark.parametrize(
    ("options", "env", "config", "answers", "site"),
    [
        (["--site", "local"], "abci3", "", None, "local (--site)"),
        ([], "local", "", None, "local ($HPCDDP_SITE)"),
        ([], "", "site: local\n", None, "local (site in HOME/.config/hpcddp/config.yaml)"),
        ([], "", "", None, "local (no scheduler"),
        ([], "local", "", "\n\n", "local ($HPCDDP_SITE)"),
        ([], "abci3", "", "./my.yaml\n\n", "my (your answer)"),
    ],
)
def test_the_site_is_said_with_its_true_source(
    init, tmp_path, monkeypatch, options, env, config, answers, site
) -> None:
    if env:
        monkeypatch.setenv("HPCDDP_SITE", env)
    (tmp_path / "home/.config/hpcddp").mkdir(parents=True)
    if config:
        (tmp_path / "home/.config/hpcddp/config.yaml").write_text(config)
    shutil.copy(REPO / "templates/sites/local.yaml", tmp_path / "my.yaml")
    said = init(*options, "--", "true", answers=answers)
    assert f"hpcddp: site {site.replace('HOME', str(tmp_path / 'home'))}" in said.err, said.err
    written = yaml.safe_load((tmp_path / "hpcddp.yaml").read_text())["site"]
    assert written == (str(tmp_path / "my.yaml") if site.startswith("my ") else "local")


def test_a_file_that_is_there_stays(init, tmp_path) -> None:
    (tmp_path / "hpcddp.yaml").write_text("nodes: 1\n")
    said = init("--site", "local", "--", "true")
    assert (said.status, (tmp_path / "hpcddp.yaml").read_text()) == (2, "nodes: 1\n")
    assert "is there already" in said.err
