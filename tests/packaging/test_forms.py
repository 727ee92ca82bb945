"""hpcddp is the same program from a wheel, an sdist, an editable install and a bare checkout."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.packaging
# What the base install brings to a login node.
BASE = {"hpcddp", "jinja2", "markupsafe", "pyyaml"}
REQUESTS = {
    "local": ["--site", "local", "--nodes", "1", "--ranks-per-node", "2"],
    "abci": ["--site", "abci3", "--account", "gaa50000", "--nodes", "3", "--walltime", "1:00:00"],
    "slurm": ["--site", "generic-slurm", "--walltime", "1:00:00", "--gpus-per-node", "4", "--cpus-per-rank", "8"],
}


class Form(NamedTuple):
    python: Path
    cwd: Path  # where `python -m hpcddp` is typed: the checkout is found from there, the others are installed
    home: Path  # the folder that holds its hpcddp/


@pytest.fixture(scope="session")
def checkout(repo, run, tmp_path_factory) -> Path:
    """A copy of the files that git has or would take: nothing built, nothing installed."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = run(["git", "-C", repo, "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    assert listed.returncode == 0, listed.stderr
    for name in filter(None, listed.stdout.split("\0")):
        if (repo / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def sdist(checkout, run, tmp_path_factory) -> Path:
    return build(run, "sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(checkout, run, tmp_path_factory) -> Path:
    return build(run, "wheel", checkout, tmp_path_factory.mktemp("wheel"))


def build(run, kind: str, source: Path, out: Path) -> Path:
    done = run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out], cwd=source)
    assert done.returncode == 0, done.stderr
    return next(out.iterdir())


@pytest.fixture(scope="session")
def forms(checkout, wheel, sdist, run, tmp_path_factory) -> dict[str, Form]:
    def install(*wanted: str | Path) -> Path:
        """The python of a new virtual environment that holds what was wanted, from PyPI where it is not a path."""
        folder = tmp_path_factory.mktemp("venv")
        python = folder / "bin/python"
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        done = run([sys.executable, "-m", "pip", "--python", python, "install", "-q", *wanted], timeout_s=240)
        assert done.returncode == 0, done.stderr
        return python

    def installed(*wanted: str | Path) -> Form:
        python = install(*wanted)
        return Form(python, empty, next(python.parents[1].glob("lib/*/site-packages")))

    empty = tmp_path_factory.mktemp("empty")
    editable = tmp_path_factory.mktemp("editable") / "hpcddp"
    shutil.copytree(checkout, editable)
    return {
        "wheel": installed(wheel),
        "sdist": installed(sdist),
        "editable": Form(install("-e", editable), empty, editable),
        "checkout": Form(install("jinja2", "pyyaml"), checkout, checkout),
    }


def hpcddp(run, form: Form, *arguments: str) -> str:
    """Its standard output, with the names of its own folders replaced, and without what only uninstalled ones need."""
    done = run([form.python, "-m", "hpcddp", *arguments], cwd=form.cwd)
    assert done.returncode == 0, done.stderr
    own = {form.python.parents[1]: "VENV", form.cwd: "CWD", form.home: "HOME"}
    text = re.sub(r"(hpcddp/)_(templates|jobs)/", r"\2/", done.stdout)
    for folder in sorted(own, key=lambda path: -len(str(path))):
        text = text.replace(str(folder), own[folder])
    return re.sub(r"export PYTHONPATH=\w+\"\$.*\n| -x PYTHONPATH", "", text)


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_form_prints_the_same_script(forms, request_name, run):
    scripts = {name: hpcddp(run, form, "render", *REQUESTS[request_name]) for name, form in forms.items()}
    assert scripts["wheel"].startswith("#!")
    for name, script in scripts.items():
        assert script == scripts["wheel"], name


@pytest.mark.parametrize("verb", [["sites"], ["sites", "show", "abci3"], ["--help"], ["--version"]], ids=" ".join)
def test_every_form_has_the_verbs_and_the_sites(forms, verb, run):
    texts = {name: hpcddp(run, form, *verb) for name, form in forms.items()}
    for name, text in texts.items():
        assert text == texts["wheel"], name


def test_an_installed_form_has_the_command(forms, run):
    for name in ("wheel", "sdist", "editable"):
        done = run([forms[name].python.parent / "hpcddp", "--version"])
        assert done.returncode == 0, (name, done.stderr)


def test_the_base_install_is_small(forms, run):
    python = forms["wheel"].python
    done = run([sys.executable, "-m", "pip", "--python", python, "list", "--format", "json"])
    assert {package["name"].lower() for package in json.loads(done.stdout)} == BASE


def test_the_wheel_holds_the_package_with_templates_and_jobs_and_no_tests(repo, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hpcddp/py.typed" in names
    for folder in ("templates", "jobs"):
        ours = {str(path.relative_to(repo)) for path in (repo / folder).rglob("*") if path.is_file()}
        ours = {name for name in ours if "__pycache__" not in name}
        assert ours
        assert {f"hpcddp/_{name}" for name in ours} == {name for name in names if name.startswith(f"hpcddp/_{folder}/")}
    assert {name.split("/")[0] for name in names} == {"hpcddp", wheel.name.split("-py3")[0] + ".dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_builds_the_same_wheel(sdist, wheel, run, tmp_path):
    assert run(["tar", "-xf", sdist, "-C", tmp_path]).returncode == 0
    again = build(run, "wheel", next(tmp_path.iterdir()), tmp_path / "out")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
