"""A template's compiled form saves time and decides nothing: the script is always that of the template as it stands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes

from hpcddp.script import render

from .conftest import ENOUGH, script

RENDER = ["-m", "hpcddp", "render", "--no-check", "--site", "abci3", "--account", "g", "--", "python", "train.py"]


@pytest.fixture
def templates(repo, tmp_path, monkeypatch) -> Path:
    """A copy of the templates that `render` takes instead of its own, with nothing compiled, and Python may write."""
    folder = tmp_path / "templates"
    shutil.copytree(repo / "templates", folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(render, "find_data_folder", lambda name: str(tmp_path / name))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The names of the templates that jinja2 compiles from now on."""
    names: list[str] = []
    compile_template = jinja2.Environment.compile

    def counted(self, source, name=None, *args, **kwargs):
        names.append(name)
        return compile_template(self, source, name, *args, **kwargs)

    monkeypatch.setattr(jinja2.Environment, "compile", counted)
    return names


@pytest.mark.parametrize("site", ENOUGH)
def test_the_second_render_compiles_nothing_and_prints_the_same(site, templates, compilations):
    first = script(site, nodes="1")
    assert "base.sh.j2" in compilations
    compilations.clear()
    assert script(site, nodes="1") == first
    assert not compilations


def test_a_changed_template_shows_at_once_even_with_the_old_times(templates):
    before = script("abci3")
    path = templates / "base.sh.j2"
    stat = path.stat()
    path.write_text(path.read_text().replace("set -e #", "set -u #"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert script("abci3") == before.replace("set -e #", "set -u #") != before


def test_where_nothing_can_be_written_the_script_is_the_same(templates):
    before = script("abci3")
    shutil.rmtree(templates / "__pycache__")
    (templates / "__pycache__").write_text("a file, so that no folder can be made; root may write everywhere else")
    assert script("abci3") == before


def test_where_python_writes_no_byte_code_nothing_is_written(templates, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    script("abci3")
    assert not (templates / "__pycache__").exists()


def test_pythonpycacheprefix_is_where_compiled_forms_go(run, tmp_path):
    done = run([sys.executable, *RENDER], env={"PYTHONPYCACHEPREFIX": str(tmp_path)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob(f"*.{sys.implementation.cache_tag}"))


def test_processes_that_start_at_once_print_the_same_script(tmp_path):
    env = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    started = [subprocess.Popen([sys.executable, *RENDER], env=env, cwd=tmp_path, stdout=-1, stderr=-1) for _ in "1234"]
    printed = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert len(printed) == 1
    written = [path.name for path in (tmp_path / "cache").rglob("templates/__pycache__/*")]
    assert written
    assert all(name.endswith(f".{sys.implementation.cache_tag}") for name in written), written


def test_what_jinja2_compiles_depends_on_no_code_of_hpcddp(repo):
    """A filter of a constant, and `printable` of a constant, would be called when a template is compiled, and a change
    of theirs would not show in what is compiled already."""
    environment = jinja2.Environment(**render.SETTINGS)
    for path in (repo / "templates").rglob("*.j2"):
        tree = environment.parse(path.read_text())
        for node in tree.find_all(nodes.Filter):
            assert not isinstance(node.node, nodes.Literal), f"{path.name} line {node.lineno}"
        for node in tree.find_all(nodes.Const):
            assert render.printable(node.value) is node.value, f"{path.name} line {node.lineno}"
