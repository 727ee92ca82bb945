"""Each mistake of a training script is found at its line, and scripts near it that are right have none."""

from __future__ import annotations

import ast
import contextlib
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcddp.cli.main import main
from hpcddp.errors import RequestError
from hpcddp.lint.rules import PYTHON_RULES, lint_python, lint_script
from hpcddp.lint.script import read_script

from .python_cases import CASES, DDP, END, INIT, STEP, loop

BAD = [(rule, line, text) for rule, cases in CASES.items() for line, text in cases.bad]
GOOD = [(rule, text) for rule, cases in CASES.items() for text in cases.good]


def lint(text: str) -> list[tuple[str, int]]:
    return [(finding.rule, finding.line) for finding in lint_python("t.py", text)]


@pytest.mark.parametrize(("rule", "line", "text"), BAD)
def test_the_mistake_is_found_at_its_line(rule, line, text):
    assert (rule, line) in lint(text), lint(text)


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_a_script_near_it_that_is_right_is_not_blamed(rule, text):
    assert rule not in {name for name, _ in lint(text)}


def test_every_rule_has_two_right_scripts_near_its_mistake():
    assert list(CASES) == [rule for rule, _, _ in PYTHON_RULES]
    assert all(cases.bad and len(cases.good) >= 2 for cases in CASES.values())


def test_a_script_as_it_should_be_has_no_finding():
    text = loop(
        f"{STEP}if step % 100 == 0 and rank == 0:\n    print(loss.item())",
        f"{DDP}torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\nsampler = DistributedSampler(data)\n",
        f"    sampler.set_epoch(epoch + 1)\n    if rank == 0:\n        torch.save(model.state_dict(), 'c.pt')\n{END}",
    )
    assert lint(text) == []


@pytest.mark.parametrize("framework", ["hpcddp", "accelerate", "lightning", "pytorch_lightning"])
def test_what_a_framework_does_itself_is_not_asked_of_the_script(framework):
    text = loop(
        STEP,
        f"import {framework}\n{INIT}sampler = DistributedSampler(data)\nnet = DDP(net)\n"
        "loader = DataLoader(data, shuffle=True)\nstate = torch.load('checkpoint.pt')\n",
        "    torch.save(net.state_dict(), 'c.pt')\n",
    )
    assert lint(text) == []


def test_a_script_of_the_hf_trainer_is_not_asked_for_a_sampler():
    text = "from transformers import Trainer\nTrainer(model, args).train()\ntorch.save(model.state_dict(), 'c.pt')\n"
    assert lint(text) == []


def test_the_projects_own_scripts_have_no_mistake(repo):
    files = [*(repo / "benchmarks/lines").glob("*/with_*.py"), repo / "hpcddp/trainer.py"]
    assert len(files) > 20
    for file in files:
        found = [f for f in lint_python(str(file), file.read_text(encoding="utf-8")) if f.kind == "mistake"]
        assert found == [], file


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("\x7fELF\0\0", "is a binary file"),
        ('{"cells": [], "metadata": {}, "nbformat": 4}', "is a notebook"),
        ("print 'Python 2'\n", "is not Python"),
        ("def", "is not Python"),
        ("%cd data\nimport torch\n", "is not Python"),
        ("x = '\udc80'\n", "is not Python"),
        ("\ud800", "is not Python"),
        ("(" * 5000, "is not Python"),
        ("-" * 200_000 + "1", "is not Python: it is nested too deeply"),
    ],
)
def test_what_is_no_training_script_is_refused_in_two_lines(text, what):
    with pytest.raises(RequestError) as refused:
        lint_python("t.py", text)
    assert re.fullmatch(rf"t\.py {what}.*\nhint: .*", str(refused.value))


@pytest.mark.parametrize("text", ["", "\n", "\x7fELF\0", ' {"nbformat": 4}'])
def test_what_is_no_job_script_is_refused_too(text):
    with pytest.raises(RequestError, match=r"is empty|is a binary file|is a notebook"):
        lint_script("job.sh", read_script(text, None, lambda path: True))


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        (
            "a b.ipynb",
            b"{",
            "notebook, not a script\nhint: jupyter nbconvert --to script 'a b.ipynb' && hpcddp lint 'a b'.py",
        ),
        ("job.sh", b"\x1f\x8b\x08\x01packed", "binary file, not a script\nhint: see what it is: file job.sh"),
        ("t.py", b"\x89PNG\r\n", "binary file, not a script\nhint: see what it is: file t.py"),
        ("job.sh", b"#!/bin/bash\n" + bytes(9), "binary file, not a script\nhint: see what it is: file job.sh"),
    ],
)
def test_a_file_that_no_rule_is_for_is_refused_by_name(name, data, error, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert main(["lint", name]) == 2
    assert capsys.readouterr().err == f"hpcddp: {name} is a {error}\n"


def test_a_file_may_name_its_encoding():
    text = b"# -*- coding: latin-1 -*-\nname = '\xe9'\nm = nn.DataParallel(m)\n".decode("utf-8", "surrogateescape")
    assert lint(text) == [("A6", 3)]
    assert lint("\ufeffm = nn.DataParallel(m)\r\n") == [("A6", 1)]


def lint_or_refuse(text: str) -> None:
    with contextlib.suppress(RequestError):
        lint(text)


@given(st.binary())
def test_no_bytes_end_in_a_traceback(data):
    lint_or_refuse(data.decode("utf-8", "surrogateescape"))


PIECES = sorted({piece for _, _, text in BAD for piece in re.findall(r"\w+|[^\w\n]|\n +", text)})


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_of_the_words_of_scripts_ends_in_a_traceback(text):
    lint_or_refuse(text)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from([text for _, _, text in BAD]), st.data())
def test_no_part_of_a_script_ends_in_a_traceback(text, data):
    lines = text.splitlines()
    lint_or_refuse("\n".join(data.draw(st.permutations(lines))))
    tree = ast.parse(text)  # and with parts left out, as a tree that still is one
    lint_or_refuse(ast.unparse(ast.Module(data.draw(st.permutations(tree.body))[:-1], [])))


@pytest.mark.parametrize(
    "text",
    [
        "x" + ".x" * 20_000,
        "f" + "()" * 20_000,
        "+".join(["x"] * 20_000),
        "".join(f"{' ' * i}if x:\n" for i in range(99)) + " " * 99 + "mp.spawn(f)",
        "if x:\n  pass\n" + "elif rank:\n  torch.save(m)\n" * 2_000,
        "".join(f"def f{i}():\n  f{i + 1}()\n" for i in range(2_000)) + "f0()",
    ],
    ids=["attributes", "calls", "sum", "ifs", "elifs", "functions"],
)
def test_deep_code_is_read_or_refused(text):
    lint_or_refuse(text)


class Visits:
    """Counts how often the rules enter a function of this package, by which time grows."""

    def __init__(self, text: str) -> None:
        self.count = 0
        sys.setprofile(self.enter)
        try:
            lint_or_refuse(text)
        finally:
            sys.setprofile(None)

    def enter(self, frame, event, argument) -> None:
        self.count += event == "call"


@pytest.mark.parametrize("rule", CASES)
def test_twice_the_script_takes_twice_the_steps(rule):
    _, text = CASES[rule].bad[0]
    short, long = Visits(f"{text}\n" * 10).count, Visits(f"{text}\n" * 20).count
    assert long < 2.6 * short
