"""hpcddp is the same program from a wheel, an sdist, an editable install and a bare checkout."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.xdist_group("packaging")]  # one worker builds and installs, once
# What the base install brings to a login node.
BASE = {"hpcddp", "jinja2", "markupsafe", "pyyaml", "shtab"}
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
def form(checkout, request, run, tmp_path_factory) -> Callable[[str], Form]:
    """Makes a form when it is first asked for: "wheel", "sdist", "editable" or "checkout"."""

    def install(*wanted: str | Path) -> Path:
        """The python of a new virtual environment that holds what was wanted, from PyPI where it is not a path."""
        folder = tmp_path_factory.mktemp("venv")
        python = folder / "bin/python"
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        done = run([sys.executable, "-m", "pip", "--python", python, "install", "-q", *wanted])
        assert done.returncode == 0, done.stderr
        return python

    @functools.cache
    def make(name: str) -> Form:
        if name == "checkout":
            return Form(install("jinja2", "pyyaml"), checkout, checkout)
        if name == "editable":
            home = tmp_path_factory.mktemp("editable") / "hpcddp"
            shutil.copytree(checkout, home)
            return Form(install("-e", home), empty, home)
        python = install(request.getfixturevalue(name))
        return Form(python, empty, next(python.parents[1].glob("lib/*/site-packages")))

    empty = tmp_path_factory.mktemp("empty")
    return make


def hpcddp(run, form: Form, *arguments: str) -> str:
    """Its standard output, with the names of its own folders replaced, and without what only uninstalled ones need."""
    done = run([form.python, "-m", "hpcddp", *arguments], cwd=form.cwd)
    assert done.returncode == 0, done.stderr
    own = {form.python.parents[1]: "VENV", form.cwd: "CWD", form.home: "HOME"}
    text = re.sub(r"(hpcddp/)_(templates|jobs)/", r"\2/", done.stdout)
    for folder in sorted(own, key=lambda path: -len(str(path))):
        text = text.replace(str(folder), own[folder])
    return re.sub(r"export PYTHONPATH=\w+\"\$.*\n| -x PYTHONPATH", "", text)


# Each is compared with the wheel. The other tests run on an editable install, and one below builds the sdist's wheel.
SLOW = pytest.mark.slow
OTHERS = ["checkout", pytest.param("sdist", marks=SLOW), pytest.param("editable", marks=SLOW)]


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("other", OTHERS)
def test_every_form_prints_the_same_script(form, other, request_name, run):
    script, wanted = (hpcddp(run, form(name), "render", *REQUESTS[request_name], "--demo") for name in (other, "wheel"))
    assert wanted.startswith("#!")
    assert script == wanted


@pytest.mark.parametrize("verb", [["sites"], ["sites", "show", "abci3"], ["--help"], ["--version"]], ids=" ".join)
@pytest.mark.parametrize("other", OTHERS)
def test_every_form_has_the_verbs_and_the_sites(form, other, verb, run):
    assert hpcddp(run, form(other), *verb) == hpcddp(run, form("wheel"), *verb)


@pytest.mark.parametrize("name", ["wheel", *OTHERS[1:]])
def test_an_installed_form_has_the_command(form, name, run):
    done = run([form(name).python.parent / "hpcddp", "--version"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["wheel", *OTHERS[1:]])
def test_an_installed_form_starts_the_guard_where_python_ignores_its_path(form, name, run):
    code = "import sys; print('hpcddp_guard' in sys.modules)"
    done = run([form(name).python, "-I", "-c", code], env={"HPCDDP_AGENT_NAMES": "torchrun"})
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_base_install_is_small(form, run):
    python = form("wheel").python
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
    top = {"hpcddp", "hpcddp_guard.pth", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {name.split("/")[0] for name in names} == top
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_builds_the_same_wheel(sdist, wheel, run, tmp_path):
    assert run(["tar", "-xf", sdist, "-C", tmp_path]).returncode == 0
    again = build(run, "wheel", next(tmp_path.iterdir()), tmp_path / "out")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
