"""Each mistake of a training script is found at its line, and scripts near it that are right have none."""

from __future__ import annotations

import ast
import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
