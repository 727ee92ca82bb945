"""docs/api.md lists every public name of the package and of the objects that it gives, no more and no less."""

from __future__ import annotations

import inspect
import re

import pytest

import hpcddp
import hpcddp.integrations
from hpcddp.integrations.plain_loop import Loop
from hpcddp.login.job import Job
from hpcddp.training.data.evaluation import EvaluationLoader
from hpcddp.training.data.loader import TrainingLoader
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.runtime import Runtime

CLASSES = {kind.__name__: kind for kind in (Runtime, Group, TrainingLoader, EvaluationLoader, Loop, Job)}


def listed(repo, heading: str) -> list[str]:
    text = (repo / "docs/api.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return sorted(re.findall(r"^\| `(\w+)` \| \S", found[1], re.MULTILINE))


def set_on_instances(kind: type) -> set[str]:
    own = [base for base in kind.__mro__ if base.__module__.startswith("hpcddp.")]
    return {name for base in own for name in re.findall(r"self\.([a-z]\w*)(?::[^=\n]+)? = ", inspect.getsource(base))}


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_lists_every_public_attribute_of_a_class(repo, name):
    kind = CLASSES[name]
    assert listed(repo, name) == sorted({n for n in dir(kind) if not n.startswith("_")} | set_on_instances(kind))


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_and_property_has_a_docstring(name):
    members = [inspect.getattr_static(CLASSES[name], n) for n in dir(CLASSES[name]) if not n.startswith("_")]
    documented = [m for m in members if isinstance(m, property) or inspect.isfunction(m)]
    assert [m for m in documented if not m.__doc__] == []


def test_the_page_and_dir_list_every_public_name_of_the_package(repo):
    assert listed(repo, "hpcddp") == sorted(n for n in dir(hpcddp) if not n.startswith("_"))
    assert all(getattr(hpcddp, name).__doc__ for name in listed(repo, "hpcddp"))


def test_the_page_lists_every_public_name_of_the_integrations(repo):
    assert listed(repo, "integrations") == sorted(hpcddp.integrations.__all__)
    assert all(getattr(hpcddp.integrations, name).__doc__ for name in listed(repo, "integrations"))
