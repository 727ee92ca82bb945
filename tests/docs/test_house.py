"""The picture of the house is the one that the imports give."""

from __future__ import annotations

import importlib.util
import shutil

import pytest


@pytest.fixture(scope="module")
def maker(repo):
    spec = importlib.util.spec_from_file_location("make_house", repo / "docs/make_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_imports(maker, repo):
    for inside, file in maker.PICTURES.items():
        drawn = maker.draw(maker.read_rooms(repo, inside))
        assert (repo / "docs" / file).read_text(encoding="utf-8") == drawn, "run: python docs/make_house.py"


def test_the_picture_changes_with_an_import_between_rooms(maker, repo, tmp_path):
    shutil.copytree(repo / "hpcddp", tmp_path / "hpcddp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo / "pyproject.toml", tmp_path)
    (tmp_path / "hpcddp/ranks/more.py").write_text("def late():\n    from hpcddp.cli import main\n")
    drawn = (repo / "docs" / maker.PICTURES["hpcddp"]).read_text(encoding="utf-8")
    assert maker.draw(maker.read_rooms(tmp_path)) != drawn
